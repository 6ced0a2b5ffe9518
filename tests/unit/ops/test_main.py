"""The command line ends with one sentence and the exit code of what went wrong, never with a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from isles.ops import main
from isles.ops.options import Number
from isles.proto.errors import FencedError, IslesError, RefusedError, StoreLockedError, UnreachableError, UsageError


@pytest.fixture
def run_raising(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """Runs a command that raises."""

    def run(error: BaseException) -> int:
        @click.command("status")
        def status() -> None:
            raise error

        monkeypatch.setattr(main.Commands, "get_command", lambda _self, _context, _name: status)
        return main.run(["status"])

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("mend it"), 2),
        (StoreLockedError("mend it"), 2),
        (RefusedError("mend it"), 3),
        (FencedError("mend it"), 4),
        (UnreachableError("mend it"), 5),
        (click.ClickException("mend it"), 1),
    ],
)
def test_an_error_that_is_raised_on_purpose_is_a_sentence_and_its_code(
    error: IslesError, code: int, run_raising: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(error) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", "isles: mend it\n")


def test_a_text_of_several_lines_becomes_one(
    run_raising: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    run_raising(UsageError("first\n  second"))
    assert capsys.readouterr().err == "isles: first second\n"


def test_an_interrupt_is_exit_code_130(run_raising: Callable[[BaseException], int]) -> None:
    assert run_raising(KeyboardInterrupt()) == 130
    assert run_raising(click.Abort()) == 130


@pytest.mark.parametrize("name", ["numpy", "torch", "torch.nn", "safetensors.torch", "zstandard"])
def test_a_machine_without_what_training_needs_says_so(
    name: str, run_raising: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(ModuleNotFoundError(f"No module named {name!r}", name=name)) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert f"needs {name.partition('.')[0]}, which is not installed here: install isles with its extra" in sentence


def test_a_module_of_isles_that_is_missing_is_a_mistake_of_isles(run_raising: Callable[[BaseException], int]) -> None:
    assert run_raising(ModuleNotFoundError("No module named 'isles.proto.x'", name="isles.proto.x")) == 70


def test_a_mistake_of_ours_is_logged_with_its_traceback_and_told_in_a_sentence(
    run_raising: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(LookupError("no such thing")) == 70
    log, sentence = capsys.readouterr().err.splitlines()
    assert '"event": "process.failed"' in log
    assert "Traceback" in log
    assert sentence == "isles: unexpected LookupError: no such thing (a mistake of isles: see the log)"


def test_a_mistake_that_was_logged_already_is_not_logged_twice(
    run_raising: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str]
) -> None:
    error = LookupError("x")
    error.is_logged = True  # type: ignore[attr-defined]
    run_raising(error)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_reader_that_left_is_no_error(
    run_raising: Callable[[BaseException], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert run_raising(BrokenPipeError()) == 0


def options(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Option]]:
    """All of a command and of those below it, with the words that lead to them."""
    context = click.Context(command)
    for option in command.params:
        if isinstance(option, click.Option):
            yield " ".join((*path, option.opts[0])), option
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from options(below, (*path, name))


def test_no_flag_takes_a_number_that_nothing_can_hold() -> None:
    """Numbers of any length are Python's alone: what takes them further would end with a traceback."""
    of_plans = {"up --chaos-seed", "chaos --seed"}  # the plan that they become has the bound
    found = list(options(main.isles))
    assert {words for words, option in found if isinstance(option.type, click.types.IntParamType)} == of_plans
    bounded = [option for _, option in found if isinstance(option.type, Number)]
    assert len(bounded) > 5
    for option in bounded:
        context = click.Context(main.isles)
        assert option.type.convert("1", option, context) == 1
        for text in ("-1", "x", "1.5", str(10**23), "9" * 5000):
            with pytest.raises(click.BadParameter):
                option.type.convert(text, option, context)


@pytest.mark.parametrize("flag", ["--tokens", "--rounds", "--seed"])
def test_a_run_takes_no_number_that_its_record_cannot_hold(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["up", "--run-dir", str(tmp_path / "run"), flag, str(10**23)]) == 2
    assert "must be a whole number" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
