"""`isles check`: whether a run kept its promises, from its store and its logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import click

from isles.ops.history import tape_options, tape_reach

EXIT_BROKEN: Final = 1

TEXT: Final = """Check that a run lost nothing.

RUN is a folder of `isles up`, or the store folder of a broker; it may be running or not. Versions are contiguous,
epochs never go back, every accepted contribution was merged exactly once or rejected or is pending, tokens add up, no
learner went back to an older version, restarts are counted, and the tape replays bit by bit. Ends with 0 if nothing is
broken, else with 1.

What a learner held is checked wherever a contribution or its log says so; its log has each version it applied only
with --log-level debug, and a store alone has no logs.
"""


def build(name: str) -> click.Command:
    """The command."""

    @click.command(name, help=TEXT)
    @click.option("--replay/--no-replay", "has_replay", default=True, help="Whether the tape is replayed.")
    @click.option("--json", "is_json", is_flag=True, help="Print one JSON object instead of a table.")
    def check(
        run: Path | None, broker: str | None, key: Path | None, timeout: float, has_replay: bool, is_json: bool
    ) -> int:
        from isles.ops.chaos.checker import check as check_facts
        from isles.ops.chaos.checker import is_kept
        from isles.ops.chaos.conclusion import REPORT_NAME, digests_in
        from isles.ops.chaos.facts import read_facts
        from isles.ops.chaos.report import findings_as_json, render_findings

        damaged = digests_in(run / REPORT_NAME) if run is not None else []
        facts = read_facts(run, tape_reach(broker, key), timeout, damaged_on_purpose=damaged, has_replay=has_replay)
        findings = check_facts(facts)
        if is_json:
            click.echo(json.dumps({"is_kept": is_kept(findings), "findings": findings_as_json(findings)}, indent=2))
        else:
            from isles.ops.wording import make_console

            make_console().print(render_findings(findings))
        return 0 if is_kept(findings) else EXIT_BROKEN

    return tape_options(check)
