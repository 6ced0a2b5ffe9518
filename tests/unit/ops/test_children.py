"""A child's command line names its role, and its settings travel in a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from isles.ops.children import THREAD_VARIABLES, ChildProcess, child_environment, isles_command
from isles.proto.errors import ConfigError


def test_a_command_line_names_the_role_of_its_process() -> None:
    assert "isles worker --id us-0" in " ".join(isles_command("worker", "--id", "us-0"))


def test_settings_of_the_parent_are_not_set_again_in_the_child() -> None:
    environment = child_environment(1, {"ISLES_WORKER__REGION": "us", "HOME": "h"})
    assert environment == {"HOME": "h"}


def test_computing_children_share_the_cores() -> None:
    num_cores = os.cpu_count() or 1
    environment = child_environment(4 * num_cores, {})
    assert {environment[name] for name in THREAD_VARIABLES} == {"1"}
    assert child_environment(1, {}) == {}


def test_a_number_of_threads_that_somebody_chose_is_kept() -> None:
    assert child_environment(64, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_a_run_folder_that_was_removed_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"broker\.err cannot be written"):
        ChildProcess(["--version"], output=tmp_path / "gone" / "broker.err", environment={})
