"""A task of one's own is looked for before anything is started, and not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.proto.errors import ConfigError, UsageError
from isles.workers.finding import check_task

SOURCE = """
raise SystemExit("never run")
from elsewhere import borrowed as lent
assigned = lambda settings: None
def made(settings): ...
class Made: ...
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "starred.py").write_text("from mine import *")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "tasks.py").write_text("def make(settings): ...")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["gpt", "mine:made", "mine:Made", "mine:assigned", "mine:lent", "starred:made", "package.tasks:make"]
)
def test_a_task_that_may_be_there_is_taken_without_running_its_module(name: str) -> None:
    check_task(name)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nomod:fn", "there is no module nomod"),
        ("package.nomod:fn", r"there is no module package\.nomod"),
        ("mine.deeper:fn", r"there is no module mine\.deeper"),
        ("mine:fn", r"there is no fn in .*mine\.py"),
        ("mine:borrowed", "there is no borrowed in"),
        ("broken:fn", r"broken\.py cannot be read as Python"),
    ],
)
def test_a_task_that_cannot_be_there_is_named_with_the_place(name: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        check_task(name)


@pytest.mark.parametrize("name", ["foo", "gpt:", ":fn", "a b:c", "mine:made:twice"])
def test_a_name_of_another_form_names_no_task(name: str) -> None:
    with pytest.raises(ConfigError, match="names no task: write `gpt` or `module:function`"):
        check_task(name)
