"""`isles check`: whether a run kept its promises, from its store and its logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from isles.ops.history import tape_options, tape_reach
from isles.proto.errors import UsageError

if TYPE_CHECKING:
    from isles.ops.chaos.logbook import Line

EXIT_BROKEN: Final = 1

TEXT: Final = """Check that a run lost nothing.

RUN is a folder of `isles up`, or the store folder of a broker; it may be running or not. Versions are contiguous,
epochs never go back, every accepted contribution was merged exactly once or rejected or is pending, tokens add up, no
learner went back to an older version, restarts are counted, and the tape replays bit by bit. Ends with 0 if nothing is
broken, else with 1.

Of a run that is going on everything is told as it stands at one moment, and what only the end can tell is named.

What a learner held is checked wherever a contribution or its log says so; its log has each version it applied only
with --log-level debug. A store or a broker alone has no logs: name them with --log, as in
`docker compose logs --no-log-prefix | docker compose exec -T broker isles check --log - --broker ADDRESS`.
"""


def build(name: str) -> click.Command:
    """The command."""

    @click.command(name, help=TEXT)
    @click.option("--replay/--no-replay", "has_replay", default=True, help="Whether the tape is replayed.")
    @click.option(
        "--log",
        type=click.Path(path_type=Path, allow_dash=True),
        metavar="FILE",
        help="What the processes of the run have logged, all in one file; - is standard input.",
    )
    @click.option("--json", "is_json", is_flag=True, help="Print one JSON object instead of a table.")
    def check(
        run: Path | None,
        broker: str | None,
        key: Path | None,
        timeout: float,
        has_replay: bool,
        log: Path | None,
        is_json: bool,
    ) -> int:
        from isles.ops.chaos.checker import check as check_facts
        from isles.ops.chaos.checker import is_kept
        from isles.ops.chaos.conclusion import REPORT_NAME, digests_in
        from isles.ops.chaos.facts import read_facts
        from isles.ops.chaos.report import findings_as_json, render_findings

        lines = None if log is None else read_lines(log)
        damaged = digests_in(run / REPORT_NAME) if run is not None else []
        reach = tape_reach(broker, key)
        facts = read_facts(run, reach, timeout, damaged_on_purpose=damaged, has_replay=has_replay, lines=lines)
        findings = check_facts(facts)
        if is_json:
            found = {"is_kept": is_kept(findings), "is_going_on": facts.is_going_on}
            click.echo(json.dumps({**found, "findings": findings_as_json(findings)}, indent=2))
        else:
            from isles.ops.wording import make_console

            console = make_console()
            for part in render_findings(findings):
                console.print(part)
        return 0 if is_kept(findings) else EXIT_BROKEN

    return tape_options(check)


def read_lines(log: Path) -> list[Line]:
    """The lines of a log, those of other programs left out. Raises UsageError for a file that cannot be read."""
    from isles.ops.chaos.logbook import LINE_BYTES_MAX, parse

    try:
        with click.open_file(str(log), "rb") as file:
            found = [parse(line) for line in file if len(line) <= LINE_BYTES_MAX]
    except OSError as error:
        raise UsageError(f"the log {log} cannot be read ({error.strerror or error})") from error
    return [line for line in found if line is not None]
