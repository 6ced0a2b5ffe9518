"""A run folder belongs to one process, and what it keeps survives that process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

import pytest

from isles.ops.run_folder import RunFolder, State, choose_address
from isles.proto.errors import UsageError
from isles.proto.transport.address import Address


def test_a_second_process_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        assert folder.is_locked()
        with pytest.raises(UsageError, match="another `isles up` is running"):
            RunFolder(folder.path).__enter__()


def test_a_folder_that_cannot_be_locked_is_not_blamed_on_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UsageError, match=r"cannot be locked \(No locks available\): name one on a file system"):
        RunFolder(tmp_path / "run").__enter__()


def test_a_folder_is_free_again_after_its_process(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        pass
    assert not folder.is_locked()
    with folder:
        assert folder.logs.is_dir()


@pytest.mark.parametrize("error", [UsageError("mend it"), KeyboardInterrupt(), None])
def test_a_run_that_is_not_begun_leaves_nothing(tmp_path: Path, error: BaseException | None) -> None:
    with contextlib.suppress(UsageError, KeyboardInterrupt), RunFolder(tmp_path / "runs" / "mine"):
        if error is not None:
            raise error
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_not_begun_leaves_what_others_put_there(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with RunFolder(tmp_path) as folder:
        (folder.workers / "precious").write_text("")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["logs", "precious", "workers"]


@pytest.mark.parametrize("kept", ["config.toml", "state.json"])
def test_a_run_that_was_begun_stays_whatever_ends_it(tmp_path: Path, kept: str) -> None:
    with contextlib.suppress(UsageError), RunFolder(tmp_path / "run") as folder:
        (folder.path / kept).write_text("")
        raise UsageError("mend it")
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(["lock", "logs", "workers", kept])


def test_a_folder_that_never_was_used_is_not_locked(tmp_path: Path) -> None:
    assert not RunFolder(tmp_path / "none").is_locked()


def test_a_folder_that_cannot_be_made_is_a_mistake_of_the_person(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run").__enter__()


@pytest.mark.parametrize("name", ["summary.json", "model.safetensors", "letter.txt"])
def test_a_folder_of_somebody_elses_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(UsageError, match="is no run folder, and not empty"):
        RunFolder(tmp_path).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_too_little_room_is_told_with_both_figures_and_what_to_set(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.check_room(0)
    with pytest.raises(UsageError, match=r"has .* free, .* below 1000000 TB.*--set broker.disk_free_bytes_min"):
        folder.check_room(10**18)


def test_the_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_state() == State()
    state = State("tcp://127.0.0.1:1,2,3", 4.5, {"outer": 2}, 3, {"us-0.step_seconds": "1"})
    folder.write_state(state)
    assert folder.read_state() == state


def test_a_file_that_the_disk_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json.tmp").mkdir()
    with pytest.raises(UsageError, match=r"state.json cannot be written"):
        RunFolder(tmp_path).write_state(State())


@pytest.mark.parametrize("text", ["{", '{"unknown": 1}', "[]", '"text"'])
def test_a_damaged_state_is_named_with_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(UsageError, match="is damaged"):
        RunFolder(tmp_path).read_state()


def test_a_summary_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_summary() is None
    folder.summary.write_text("[1]")
    assert folder.read_summary() is None
    folder.summary.write_text('{"status": "finished"}')
    assert folder.read_summary() == {"status": "finished"}


def test_the_last_words_of_a_process_are_its_last_line_without_the_prefix(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        assert folder.last_words("outer") == ""
        folder.errors("outer").write_text("x" * 10_000 + "\nisles: the disk is full\n\n")
        assert folder.last_words("outer") == "the disk is full"


def test_empty_error_files_are_tidied_away(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.errors("outer").write_text("")
        folder.errors("broker").write_text("words")
        folder.tidy()
        assert [path.name for path in folder.logs.iterdir()] == ["broker.err"]


def test_the_kept_address_is_taken_again_while_its_ports_are_free() -> None:
    address = choose_address("")
    assert choose_address(str(address)) == address


def test_another_address_is_chosen_when_a_port_is_taken() -> None:
    address = choose_address("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", address.bulk_port))
        taken.listen()
        other = choose_address(str(address))
    assert isinstance(other, Address)
    assert other != address
