"""The command line. Parse first, import after: `isles --help` loads click and nothing else of weight.

A command ends with one of the exit codes below, and with one sentence on standard error when something was wrong.

    0    done                             70   a mistake of isles itself; the traceback is in the log
    1    it failed, or did not hold       130  interrupted
    2    a person can mend it
    3, 4 a broker refused, or fenced, this process
    5    nobody answered
    6    the broker's store failed, or is damaged
    7    the broker's disk is full
    8    a running broker let go of what was being recomputed
    9    this learner is in quarantine
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import click

EXIT_USAGE: Final = 2
EXIT_MISTAKE: Final = 70
"""EX_SOFTWARE of sysexits.h."""
EXIT_INTERRUPTED: Final = 130


class _Entry(NamedTuple):
    module: str
    """Loaded when the command is used; it has a function `build` that takes the command's name."""
    summary: str


COMMANDS: Final[dict[str, _Entry]] = {
    "up": _Entry("isles.ops.up", "Train on this machine: broker, outer, workers and evaluator, supervised."),
    "broker": _Entry("isles.ops.processes", "Route, store and acknowledge; the one process that listens."),
    "outer": _Entry("isles.ops.processes", "Merge contributions into new versions."),
    "worker": _Entry("isles.ops.processes", "Train: one learner."),
    "evaluate": _Entry("isles.ops.processes", "Validate the global parameters while they change."),
    "keys": _Entry("isles.ops.keys", "Say who may talk to a broker: make, list, change and end keys."),
    "status": _Entry("isles.ops.status", "Show what a broker knows of its run."),
    "doctor": _Entry("isles.ops.doctor", "Examine the way from here to a broker, and say what to mend."),
    "pardon": _Entry("isles.ops.pardon", "End the quarantine of a learner."),
    "init": _Entry("isles.ops.init", "Start a run from given weights."),
    "change": _Entry("isles.ops.change", "Give a stopped run other settings."),
    "history": _Entry("isles.ops.history", "List the versions of a run and what they were made from."),
    "replay": _Entry("isles.ops.replay", "Recompute a run from its tape and compare every bit."),
    "check": _Entry("isles.ops.chaos.check", "Check that a run lost nothing."),
    "chaos": _Entry("isles.ops.chaos.command", "Make faults happen to a run, and check what came of it."),
    "plan": _Entry("isles.ops.plan.command", "Say what a run takes of links, memory, disk and money."),
    "simulate": _Entry("isles.ops.simulate", "Run the state machines, or a fleet, in a simulated world."),
    "sample": _Entry("isles.ops.sample", "Let trained parameters continue a text."),
    "export": _Entry("isles.ops.export", "Write the global parameters as a safetensors file."),
}


class Commands(click.Group):
    """Knows the names and one line about each command; loads only the one that is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        build: Callable[[str], click.Command] = importlib.import_module(entry.module).build
        return build(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


def _print_version(context: click.Context, _option: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"isles {version('isles')}")
        context.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def isles() -> None:
    """Train one PyTorch model on islands of compute that may vanish at any moment.

    `isles COMMAND --help` explains every setting of a command. A setting is a flag, a line of a TOML file
    (`--config FILE`), or a variable ISLES_<SECTION>__<KEY>; flags win over variables, variables over the file.
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Says what was wrong in one sentence on standard error."""
    from isles.proto.errors import IslesError

    try:
        code = isles.main(args=arguments, prog_name="isles", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.ClickException as error:
        return _complain(_click_sentence(error), error.exit_code)
    except IslesError as error:
        return _complain(str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _complain("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has left; Python would complain once more when it flushes at exit.
        sys.stdout = None
        return 0
    except Exception as error:  # noqa: BLE001 - the last line of defence: nobody is shown a traceback
        from isles.ops.libraries import missing_library

        missing = missing_library(error)
        return _complain_of_mistake(error) if missing is None else _complain(str(missing), missing.exit_code)
    return code if isinstance(code, int) else 0


def main() -> None:
    """The entry point of the console script."""
    sys.exit(run())


def _complain(text: str, code: int) -> int:
    with suppress(OSError):  # where nobody takes the sentence, the exit code still says it
        click.echo(f"isles: {' '.join(text.split())}", err=True)
    return code


def _click_sentence(error: click.ClickException) -> str:
    text = error.format_message().rstrip(".").replace(". (Did you mean", " (did you mean")
    context = getattr(error, "ctx", None)
    return f"{text}; see `{context.command_path} --help`" if context is not None else text


def _complain_of_mistake(error: Exception) -> int:
    if not getattr(error, "is_logged", False):
        from isles.proto.logs import make_logger

        logger = make_logger("command", "isles")
        logger.error("process.failed", error=type(error).__name__, text=str(error), exc_info=error)
    return _complain(f"unexpected {type(error).__name__}: {error} (a mistake of isles: see the log)", EXIT_MISTAKE)


if __name__ == "__main__":
    main()
