"""Reads what the checker needs: from a run folder, a store, or a running broker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from isles.ops.chaos.checker import AppliedFact, Facts, ReplayFact, RowFact, VersionFact
from isles.ops.chaos.logbook import Line, LogReader
from isles.ops.history import pages
from isles.ops.run_folder import RunFolder
from isles.ops.tape import BrokerTape, StoreTape, open_tape
from isles.proto.errors import IslesError, UsageError
from isles.proto.ids import ContributionId

NO_LOGS: Final = "there is no run folder with logs: name one, rather than a store or a broker"
NO_DEBUG: Final = "learners say which versions they apply only with --log-level debug"


def read_facts(
    run: Path | None,
    broker: str | None,
    timeout_seconds: float,
    *,
    damaged_on_purpose: Sequence[str] = (),
    has_replay: bool = True,
    is_ended: bool = False,
) -> Facts:
    """Everything there is. Logs first: what they promise must be in a store that is read later.

    `is_ended` is said by who runs the run, has ended its broker, and holds the folder's lock: the store itself is read.
    Raises UsageError if there is no such run, UnreachableError if its broker does not answer.
    """
    folder = RunFolder(run) if run is not None and (run / "logs").is_dir() else None
    said = logged(folder) if folder is not None else {"missing": _missing_logs()}
    with open_tape(folder.store if folder is not None and is_ended else run, broker, timeout_seconds) as tape:
        versions = {head.fragment: [_version(info) for info in pages(tape, head.fragment, 0)] for head in tape.heads()}
        rows = tape.rows()
        num_averaged = sum(not fragment.is_buffers for fragment in _manifest(tape).fragments)
        replayed, why = _replay(tape) if has_replay else (None, "it was not asked for")
    rejected = [*said.pop("rejected", ()), *(row.id for row in rows or () if row.state == "rejected")]
    missing = {**said.pop("missing"), "the tape": why}
    if rows is None:
        missing["rows"] = "a running broker does not show them: stop the run first"
    return Facts(
        versions=versions,
        rows=None if rows is None else [RowFact(row.id, row.state, row.settled_in) for row in rows],
        rejected=rejected,
        num_averaged=num_averaged,
        replayed=replayed,
        damaged_on_purpose=damaged_on_purpose,
        missing=missing,
        **said,
    )


def _manifest(tape: StoreTape | BrokerTape) -> Any:
    from isles.proto.manifest import Manifest

    return Manifest.from_text(tape.record.manifest)


def _version(info: Any) -> VersionFact:
    ingredients = info.recipe.ingredients if info.recipe is not None else ()
    made_from = tuple((one.id, one.tokens) for one in ingredients)
    return VersionFact(info.version, info.epoch, info.tokens_total, made_from)


def _replay(tape: StoreTape | BrokerTape) -> tuple[list[ReplayFact] | None, str]:
    try:
        from isles.ops.replay import replay_run
    except ImportError:
        return None, "numpy is not installed here: the broker needs none"
    try:
        results = replay_run(tape, [head.fragment for head in tape.heads()], None, is_silent=True)
    except ImportError:
        return None, "numpy is not installed here: the broker needs none"
    except UsageError as error:
        return None, str(error)
    except IslesError as error:
        return [ReplayFact(0, 1, 0, str(error))], ""
    return [
        ReplayFact(one.fragment, one.first, one.last, "" if one.difference is None else one.difference.text)
        for one in results
    ], ""


# ------------------------------------------------------------------------------------------------------------ the logs


def _missing_logs() -> dict[str, str]:
    return dict.fromkeys(("the broker's log", "applied versions", "the log of `isles up`"), NO_LOGS)


def logged(folder: RunFolder) -> dict[str, Any]:
    """Those fields of Facts that come from logs, by their names."""
    missing = {}
    broker = LogReader(folder.log("broker")).read()
    up = LogReader(folder.log("up")).read()
    applied = list(_applied(folder))
    if not broker:
        missing["the broker's log"] = f"{folder.log('broker')} is missing or empty"
    if not up:
        missing["the log of `isles up`"] = f"{folder.log('up')} is missing or empty"
    if not applied:
        missing["applied versions"] = NO_DEBUG
    summary = folder.read_summary() or {}
    return {
        "accepted": _contributions(broker, "contribution.accepted") if broker else None,
        "rejected": _contributions(broker, "contribution.rejected"),
        "commits": [
            (int(line["fragment"]), int(line["version"]), int(line["epoch"]))
            for line in broker
            if line["event"] == "round.committed"
        ]
        if broker
        else None,
        "applied": applied or None,
        "starts": _starts(up) if up else None,
        "num_up_starts": sum(line["event"] == "process.started" for line in up),
        "restarts_counted": folder.read_state().restarts,
        "has_ended_in_order": bool(up) and up[-1]["event"] == "run.finished",
        "tokens_merged": summary.get("tokens_merged"),
        "missing": missing,
    }


def _contributions(lines: Sequence[Line], event: str) -> list[ContributionId]:
    return [
        ContributionId(str(line["learner"]), int(line["fragment"]), str(line["incarnation"]), int(line["number"]))
        for line in lines
        if line["event"] == event and "incarnation" in line
    ]


def _starts(lines: Sequence[Line]) -> dict[str, int]:
    starts: dict[str, int] = {}
    for line in lines:
        if line["event"] == "child.started":
            child = str(line.get("child"))
            starts[child] = starts.get(child, 0) + 1
    return starts


def _applied(folder: RunFolder) -> Iterator[AppliedFact]:
    for path in sorted(folder.logs.glob("*.jsonl")):
        start = 0
        for line in LogReader(path).read():
            if line["event"] == "process.started":
                start += 1
            elif line["event"] == "version.applied":
                yield AppliedFact(str(line["learner"]), start, int(line["fragment"]), int(line["version"]))
