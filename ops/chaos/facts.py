"""Reads what the checker needs: from a run folder, a store, or a running broker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from isles.ops.chaos.checker import Facts, HeldFact, ReplayFact, RowFact, VersionFact
from isles.ops.chaos.logbook import Line, LogReader
from isles.ops.history import pages
from isles.ops.reach import Reach
from isles.ops.run_folder import RunFolder
from isles.ops.tape import BrokerTape, StoreTape, check_index, index_snapshot, open_tape
from isles.proto.errors import IslesError, StoreError, UsageError
from isles.proto.ids import ContributionId
from isles.proto.messages import Row

_Fact = TypeVar("_Fact")

NO_LOGS: Final = "there is no run folder with logs: name one, or give the lines with --log"
NO_UP: Final = "its processes were not started by `isles up`, which counts them"
NO_ROWS: Final = "a broker that is asked shows no rows: name its run folder, or its store, on its own machine"


def read_facts(
    run: Path | None,
    reach: Reach | None,
    timeout_seconds: float,
    *,
    damaged_on_purpose: Sequence[str] = (),
    has_replay: bool = True,
    is_ended: bool = False,
    lines: Sequence[Line] | None = None,
) -> Facts:
    """Everything there is. Logs first: what they promise must be in a store that is read later, and all of that store
    at one moment.

    `lines` are what all processes have said, where that is not in a run folder.
    `is_ended` is said by who runs the run, has ended its broker, and holds the folder's lock: the store itself is read.
    Raises UsageError if there is no such run, StoreError if its index is damaged, UnreachableError if its broker does
    not answer.
    """
    folder = RunFolder(run) if run is not None and (run / "logs").is_dir() else None
    if lines is not None:
        said = logged_in(lines)
    else:
        said = logged(folder) if folder is not None else {"missing": _missing_logs()}
    if run is not None:
        check_index(run)
    with open_tape(folder.store if folder is not None and is_ended else run, reach, timeout_seconds) as tape:
        is_going_on = isinstance(tape, BrokerTape)
        versions, rows, unread = _books(tape, run)
        is_deterministic = tape.record.sync.is_deterministic
        num_averaged = sum(not fragment.is_buffers for fragment in _manifest(tape).fragments)
        replayed, why = _replay(tape) if has_replay else (None, "it was not asked for")
    rejected = [*said.pop("rejected", ()), *(row.id for row in rows or () if row.state == "rejected")]
    missing = {**said.pop("missing"), "rows": unread, "the tape": why}
    return Facts(
        versions=versions,
        rows=None if rows is None else [RowFact(row.id, row.state, row.settled_in) for row in rows],
        rejected=rejected,
        num_averaged=num_averaged,
        is_deterministic=is_deterministic,
        replayed=replayed,
        damaged_on_purpose=damaged_on_purpose,
        missing=missing,
        is_going_on=is_going_on,
        **said,
    )


def _books(
    tape: StoreTape | BrokerTape, run: Path | None
) -> tuple[dict[int, list[VersionFact]], list[Row] | None, str]:
    """All versions by fragment, and all rows: of one moment, if the store is at hand. Without rows, why."""
    if isinstance(tape, StoreTape):
        return _versions_on(tape), tape.rows(), ""
    if run is None:
        return _versions_on(tape), None, NO_ROWS
    try:
        with index_snapshot(run) as snapshot:
            return _versions_on(snapshot), snapshot.rows(), ""
    except (UsageError, StoreError, OSError) as error:
        return _versions_on(tape), None, str(error)


def _versions_on(tape: StoreTape | BrokerTape) -> dict[int, list[VersionFact]]:
    return {head.fragment: [_version(info) for info in pages(tape, head.fragment, 0)] for head in tape.heads()}


def _manifest(tape: StoreTape | BrokerTape) -> Any:
    from isles.proto.manifest import Manifest

    return Manifest.from_text(tape.record.manifest)


def _version(info: Any) -> VersionFact:
    ingredients = info.recipe.ingredients if info.recipe is not None else ()
    made_from = tuple((one.id, one.tokens) for one in ingredients)
    bases = tuple(one.base_version for one in ingredients)
    return VersionFact(info.version, info.epoch, info.tokens_total, made_from, bases)


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
    return [_replayed(one) for one in results], ""


def _replayed(result: Any) -> ReplayFact:
    if result.difference is None:
        return ReplayFact(result.fragment, result.first, result.last)
    is_outrun = result.difference.kind == "outrun"
    return ReplayFact(result.fragment, result.first, result.last, result.difference.text, is_outrun)


# ------------------------------------------------------------------------------------------------------------ the logs


def _missing_logs() -> dict[str, str]:
    return dict.fromkeys(("the broker's log", "the log of `isles up`"), NO_LOGS)


def logged(folder: RunFolder) -> dict[str, Any]:
    """Those fields of Facts that come from logs, by their names."""
    missing: dict[str, str] = {}
    restarts = folder.read_state().restarts  # before the log: a restart is logged, then counted
    broker = LogReader(folder.log("broker")).read()
    up = LogReader(folder.log("up")).read()
    if not up:
        missing["the log of `isles up`"] = f"{folder.log('up')} is missing or empty"
    summary = folder.read_summary() or {}
    return {
        **_of_broker(broker, missing, f"{folder.log('broker')} is missing or empty"),
        "held": [one for path in sorted(folder.logs.glob("*.jsonl")) for one in _held(LogReader(path).read())],
        "starts": _starts(up) if up else None,
        "num_up_starts": sum(line["event"] == "process.started" for line in up),
        "restarts_counted": restarts,
        "has_ended_in_order": bool(up) and up[-1]["event"] == "run.finished",
        "tokens_merged": summary.get("tokens_merged"),
        "missing": missing,
    }


def logged_in(lines: Sequence[Line]) -> dict[str, Any]:
    """The same from the lines of all processes, mixed but in order; whose start a version belongs to, at level debug,
    cannot be told there.
    """
    missing = {"the log of `isles up`": NO_UP}
    broker = [line for line in lines if line.get("process") == "broker"]
    learners: dict[str, list[Line]] = {}
    for line in lines:
        if line["event"] in ("learner.joined", "learner.progressed"):
            learners.setdefault(str(line.get("learner")), []).append(line)
    return {
        **_of_broker(broker, missing, "the log that was given has no lines of a broker"),
        "held": [one for said in learners.values() for one in _held(said)],
        "missing": missing,
    }


def _of_broker(lines: Sequence[Line], missing: dict[str, str], why: str) -> dict[str, Any]:
    if not lines:
        missing["the broker's log"] = why
        return {"accepted": None, "commits": None}
    commits = [one for line in lines if line["event"] == "round.committed" for one in _readable(line, _commit)]
    accepted, rejected = (_contributions(lines, f"contribution.{fate}") for fate in ("accepted", "rejected"))
    return {"accepted": accepted, "rejected": rejected, "commits": commits}


def _contributions(lines: Sequence[Line], event: str) -> list[ContributionId]:
    def read(line: Line) -> list[ContributionId]:
        fragment, number = int(line["fragment"]), int(line["number"])
        return [ContributionId(str(line["learner"]), fragment, str(line["incarnation"]), number)]

    return [one for line in lines if line["event"] == event for one in _readable(line, read)]


def _commit(line: Line) -> list[tuple[int, int, int]]:
    return [(int(line["fragment"]), int(line["version"]), int(line["epoch"]))]


def _readable(line: Line, read: Callable[[Line], list[_Fact]]) -> list[_Fact]:
    """What a line says; nothing if it is not as it was written, since nothing follows from a line that is missing."""
    try:
        return read(line)
    except (KeyError, TypeError, ValueError):
        return []


def _starts(lines: Sequence[Line]) -> dict[str, int]:
    starts: dict[str, int] = {}
    for line in lines:
        if line["event"] == "child.started":
            child = str(line.get("child"))
            starts[child] = starts.get(child, 0) + 1
    return starts


def _held(lines: Sequence[Line]) -> Iterator[HeldFact]:
    """Versions that a learner said it held: all of them when it joined and now and then, each one at level debug."""
    start, is_joining = 0, True
    for line in lines:
        if line["event"] == "process.started":
            start, is_joining = start + 1, True
        elif line["event"] == "learner.joined":
            start += not is_joining  # it has joined already: a start whose first lines are not here
            is_joining = False
        for fragment, version in _readable(line, _versions):
            is_early = is_joining and line["event"] == "version.applied"
            yield HeldFact(str(line.get("learner")), start, fragment, version, is_early)


def _versions(line: Line) -> list[tuple[int, int]]:
    found: Iterable[tuple[Any, Any]] = ()
    match line["event"]:
        case "learner.joined":
            found = dict(line["versions"]).items()
        case "learner.progressed":
            found = enumerate(line["versions"])
        case "version.applied":
            found = [(line["fragment"], line["version"])]
    return [(int(fragment), int(version)) for fragment, version in found]
