"""The end of a run on one machine: its summary, written to the folder and told to the person."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from shutil import which
from typing import Any

import click
from rich.text import Text

from isles.ops.export import read_description
from isles.ops.run_folder import RunFolder, write_whole
from isles.ops.summary import Summary, summarise
from isles.ops.summary_view import render_summary
from isles.ops.supervision import End
from isles.ops.wording import make_console
from isles.proto.agreement import Budget
from isles.proto.errors import UsageError
from isles.proto.messages import ReportInfo, Status
from isles.workers.task import BUILT_IN


class RunFailedError(UsageError):
    """A run that cannot proceed; the text says why and where to look."""

    exit_code = 1


def write_summary(
    folder: RunFolder,
    end: End,
    status: Status | None,
    reports: Sequence[ReportInfo],
    *,
    wall_seconds: float,
    starts: int,
    restarts: Mapping[str, int],
    culprit: str,
    task: str,
    num_fragments: int,
) -> Summary:
    """Writes `summary.json`; `status` and `reports` are the last that the broker said, `culprit` the child to blame."""
    text = end.text
    if culprit:
        words = folder.last_words(culprit)
        text += (f": {words}" if words else "") + f" (more in {folder.log(culprit)})"
    try:
        corpus_sha256 = str(read_description(folder.model).get("corpus_sha256", ""))
    except UsageError:
        corpus_sha256 = ""
    summary = summarise(
        status,
        reports,
        ended=end.status,
        text=text,
        wall_seconds=wall_seconds,
        starts=starts,
        restarts=restarts,
        task=task,
        num_fragments=num_fragments,
        corpus_sha256=corpus_sha256,
    )
    write_whole(folder.summary, summary.model_dump_json(indent=2) + "\n")
    return summary


def tell(folder: RunFolder, summary: Summary, budget: Budget) -> None:
    """Prints the summary and what can be done next."""
    console = make_console()
    console.print(render_summary(summary))
    for what, command in next_steps(folder, summary.status, summary.task, budget):
        console.print(Text.assemble((f"  {what:16} ", "dim"), command), soft_wrap=True)


def tell_again(folder: RunFolder, found: Mapping[str, Any], budget: Budget, *, is_json: bool) -> int:
    """The same for a run that finished earlier, of which `found` was read from its `summary.json`."""
    if is_json:
        click.echo(json.dumps(found, indent=2))
        return 0
    try:
        summary = Summary.model_validate(found)
    except ValueError as error:
        raise UsageError(f"{folder.summary} is damaged: delete it, the run itself is in the store") from error
    tell(folder, summary, budget)
    return 0


def next_steps(folder: RunFolder, status: str, task: str, budget: Budget) -> list[tuple[str, str]]:
    """What a person may want to do now, each with its command."""
    isles, run_dir = typed_command(), quote(str(folder.path))
    if status != "finished":
        return [("go on", f"{isles} up --run-dir {run_dir}"), ("logs", str(folder.logs))]
    longer = f"--tokens {2 * budget.tokens}" if budget.tokens else f"--rounds {2 * (budget.rounds or 1)}"
    another = quote(f"{folder.path}-2")
    return [
        ("parameters", str(folder.model)),
        ("try them", f"{isles} sample --run-dir {run_dir} {_prompt(task)}"),
        ("train longer", f"{isles} up --run-dir {run_dir} {longer}"),
        ("start over", f"{isles} up --run-dir {another}, or delete {folder.path} first"),
    ]


def _prompt(task: str) -> str:
    """Code of one's own is named anew each time, and what it can continue is known to its author alone."""
    return '--prompt "def "' if task == BUILT_IN else f'--task {quote(task)} --prompt "..."'


def typed_command() -> str:
    """`isles` if a shell finds it; else the path of the script beside this interpreter, as after `make demo`."""
    script = Path(sys.executable).with_name("isles")
    if which("isles") or not script.is_file():
        return "isles"
    here = Path.cwd()
    return quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
