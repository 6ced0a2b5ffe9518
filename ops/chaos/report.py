"""The report of a chaos run: `chaos.json` in the run folder, and tables for a person."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from isles.ops.chaos.checker import Finding, is_kept
from isles.ops.chaos.measures import Effect, Measures
from isles.ops.chaos.showing import names
from isles.ops.wording import amount, rate, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

VERDICTS: Final = {"holds": "[green]holds[/]", "broken": "[bold red]BROKEN[/]", "unknown": "[yellow]unknown[/]"}


def as_json(
    plan: dict[str, Any],
    faults: Sequence[Any],
    measures: Measures,
    findings: Sequence[Finding],
    damaged: Sequence[str],
) -> dict[str, Any]:
    """The whole report as plain values."""
    return {
        "is_kept": is_kept(findings),
        "findings": findings_as_json(findings),
        "faults": [fault.model_dump(mode="json") for fault in faults],
        **measures.model_dump(mode="json"),
        "steps_lost_most": measures.steps_lost_most,
        "damaged_on_purpose": list(damaged),
        "plan": plan,
    }


def findings_as_json(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """What was checked."""
    return [
        {"promise": one.promise, "verdict": one.verdict, "text": one.text, "at_end": one.at_end} for one in findings
    ]


def render(faults: Sequence[Any], measures: Measures, findings: Sequence[Finding]) -> list[RenderableType]:
    """Tables for a terminal."""
    from rich.text import Text

    parts: list[RenderableType] = []
    if faults:
        began = min(fault.began_unix for fault in faults)
        parts += [_faults(faults, measures.effects, began), Text()]
    if measures.restarts:
        parts += [_restarts(measures), Text()]
    if measures.fail_overs:
        parts += [_fail_overs(measures), Text()]
    goodput = measures.goodput
    if goodput.whole is not None:
        words = [f"{rate(value)} {name}" for name, value in goodput.model_dump().items() if value is not None]
        parts.append(Text("merged tokens per second: " + ", ".join(words)))
    return [*parts, Text(), *render_findings(findings)]


def render_findings(findings: Sequence[Finding]) -> list[RenderableType]:
    """What was checked, as a table, and what could not be: that of a run that is going on."""
    from rich.text import Text

    table = _table("promise", "", "what was found")
    for one in findings:
        table.add_row(one.promise, VERDICTS[one.verdict], one.text)
    open_until_end = [one.at_end for one in findings if one.at_end]
    if not open_until_end:
        return [table]
    return [table, Text(f"The broker is running. Only the end of the run tells {'; '.join(open_until_end)}.")]


def _faults(faults: Sequence[Any], effects: Sequence[Effect], began: float) -> Table:
    table = _table("fault", "at", "for", "whom", "rounds", "tokens", "steps/s of the others", "lost")
    found = {effect.fault.number: effect for effect in effects}
    for fault in faults:
        whom = names(fault.targets)
        effect = found.get(fault.number)
        if effect is None:
            fate = f"{whom}: skipped: {fault.failure}".removeprefix(": ") if fault.failure else whom
            table.add_row(fault.kind, seconds_text(fault.began_unix - began), "", fate)
            continue
        usual = [one.steps_per_second_before for one in effect.survivors]
        then = [one.steps_per_second_during for one in effect.survivors]
        paces = f"{sum(usual) / len(usual):.2f} -> {sum(then) / len(then):.2f}" if usual else "none survived"
        lost = max((one.steps_lost for one in effect.survivors), default=None)
        table.add_row(
            fault.kind,
            seconds_text(fault.began_unix - began),
            seconds_text(fault.ended_unix - fault.began_unix) if fault.ended_unix > fault.began_unix else "",
            whom,
            str(effect.rounds_committed),
            amount(effect.tokens_merged),
            paces,
            "" if lost is None else f"{max(0.0, lost):.1f}",
        )
    return table


def _restarts(measures: Measures) -> Table:
    table = _table("restarted", "loading", "then joined", "contribution sent", "accepted")
    for one in measures.restarts:
        figures = (one.loading_seconds, one.joined_seconds, one.sent_seconds, one.accepted_seconds)
        table.add_row(one.child, *("" if figure is None else f"{figure:.2f} s" for figure in figures))
    return table


def _fail_overs(measures: Measures) -> Table:
    table = _table("outer hit", "by", "heir", "lease again", "version again")
    for one in measures.fail_overs:
        figures = (one.leased_seconds, one.committed_seconds)
        table.add_row(one.outer, one.kind, one.heir, *("" if value is None else f"{value:.2f} s" for value in figures))
    return table


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table
