"""Whether a run kept its promises, whatever happened to its processes. Pure: over facts from its store and logs.

Each promise is one finding: it holds, it was broken (and where first), or it could not be checked (and why). What the
store says is complete; what logs say is not, since a killed process takes its last lines with it. So nothing is
concluded from a line that is missing, only from lines that are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

from isles.proto.ids import ContributionId

Verdict = Literal["holds", "broken", "unknown"]

EXAMPLES_SHOWN: Final = 3
"""Of what is wrong: enough to find the rest."""


@dataclass(frozen=True, slots=True)
class VersionFact:
    """One version, as the store has it."""

    version: int
    epoch: int
    tokens_total: int
    ingredients: tuple[tuple[ContributionId, int], ...] = ()
    """What it was made from, each with its tokens."""


@dataclass(frozen=True, slots=True)
class RowFact:
    """The permanent row of one learner and fragment."""

    id: ContributionId
    state: str
    settled_in: int | None = None


@dataclass(frozen=True, slots=True)
class AppliedFact:
    """A learner logged that it holds this version now; `start` counts the starts of its process."""

    learner: str
    start: int
    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class ReplayFact:
    """What came of recomputing one fragment."""

    fragment: int
    first: int
    last: int
    difference: str = ""


@dataclass(frozen=True)
class Facts:
    """All that is known of a run; None = could not be had, and then `missing` says why."""

    versions: Mapping[int, Sequence[VersionFact]]
    """Fragment -> all its versions, the oldest first."""
    rows: Sequence[RowFact] | None = None
    accepted: Sequence[ContributionId] | None = None
    """As the broker logged them, in order."""
    rejected: Sequence[ContributionId] = ()
    """From logs and rows."""
    commits: Sequence[tuple[int, int, int]] | None = None
    """Fragment, version and epoch of each committed round, as the broker logged them."""
    applied: Sequence[AppliedFact] | None = None
    starts: Mapping[str, int] | None = None
    """Child -> how often `isles up` has started it."""
    num_up_starts: int = 0
    restarts_counted: Mapping[str, int] = field(default_factory=dict)
    has_ended_in_order: bool = False
    """Whether `isles up` got to write its last words: only then its counts are complete."""
    tokens_merged: float | None = None
    """As the summary has it, which is written a moment before the outer stops."""
    num_averaged: int = 0
    """Fragments that the mean of merged tokens is taken over: all but the one of the buffers."""
    replayed: Sequence[ReplayFact] | None = None
    damaged_on_purpose: Sequence[str] = ()
    """Digests of blobs that a fault has damaged."""
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise and what became of it."""

    promise: str
    verdict: Verdict
    text: str


def check(facts: Facts) -> list[Finding]:
    """All promises, in the order in which they build on one another."""
    return [
        _contiguous(facts),
        _epochs(facts),
        _commits(facts),
        _merged_once(facts),
        _fates(facts),
        _rows(facts),
        _tokens(facts),
        _learners(facts),
        _restarts(facts),
        _replay(facts),
    ]


def is_kept(findings: Iterable[Finding]) -> bool:
    """Whether nothing was broken."""
    return all(finding.verdict != "broken" for finding in findings)


def _finding(promise: str, faults: Sequence[str], text: str) -> Finding:
    if not faults:
        return Finding(promise, "holds", text)
    rest = f"; and {len(faults) - EXAMPLES_SHOWN} more" if len(faults) > EXAMPLES_SHOWN else ""
    return Finding(promise, "broken", "; ".join(faults[:EXAMPLES_SHOWN]) + rest)


def _unknown(promise: str, facts: Facts, what: str) -> Finding:
    return Finding(promise, "unknown", facts.missing.get(what, f"there is nothing to read about {what}"))


# ------------------------------------------------------------------------------------------------------- the versions


def _contiguous(facts: Facts) -> Finding:
    faults = []
    for fragment, versions in facts.versions.items():
        numbers = [one.version for one in versions]
        if numbers != list(range(len(numbers))):
            gap = next(right for right, found in enumerate(numbers) if found != right)
            faults.append(f"fragment {fragment}: version {gap} is missing")
    total = sum(max(0, len(versions) - 1) for versions in facts.versions.values())
    text = f"{total} versions of {len(facts.versions)} fragments, none missing"
    return _finding("versions are contiguous", faults, text)


def _epochs(facts: Facts) -> Finding:
    faults = [
        f"fragment {fragment}: version {after.version} has epoch {after.epoch} after {before.epoch}"
        for fragment, versions in facts.versions.items()
        for before, after in pairwise(versions)
        if after.epoch < before.epoch
    ]
    newest = {fragment: versions[-1].epoch for fragment, versions in facts.versions.items() if versions}
    text = f"newest epochs {_in_order(newest.values())}"
    return _finding("epochs never go back", faults, text)


def _commits(facts: Facts) -> Finding:
    promise = "rounds that were announced exist"
    if facts.commits is None:
        return _unknown(promise, facts, "the broker's log")
    faults, newest = [], dict[int, int]()
    for fragment, version, epoch in facts.commits:
        if version <= newest.get(fragment, 0):
            faults.append(f"fragment {fragment}: version {version} was committed after {newest[fragment]}")
        newest[fragment] = version
        versions = facts.versions.get(fragment, ())
        if version >= len(versions):
            faults.append(f"fragment {fragment}: version {version} was announced and is not in the store")
        elif versions[version].epoch != epoch:
            faults.append(f"fragment {fragment}: version {version} has another epoch than was announced")
    return _finding(promise, faults, f"{len(facts.commits)} announced rounds are in the store")


# -------------------------------------------------------------------------------------------------- the contributions


def _merged(facts: Facts) -> Counter[ContributionId]:
    return Counter(
        name for versions in facts.versions.values() for version in versions for name, _ in version.ingredients
    )


def _merged_once(facts: Facts) -> Finding:
    counts = _merged(facts)
    faults = [f"{name} is in {count} recipes" for name, count in counts.items() if count > 1]
    return _finding("no contribution is in two recipes", faults, f"{len(counts)} contributions, each in one")


def _fates(facts: Facts) -> Finding:
    promise = "every accepted contribution is merged once, rejected, or pending at the head"
    if facts.accepted is None:
        return _unknown(promise, facts, "the broker's log")
    counts = _merged(facts)
    rejected = set(facts.rejected)
    if facts.rows is not None:
        pending = {row.id for row in facts.rows if row.state == "pending"}
    else:  # the newest of each learner and fragment may be: the row of a running broker cannot be read
        pending = set({(name.learner, name.fragment): name for name in facts.accepted}.values())
    fates = Counter[str]()
    faults = []
    for name in facts.accepted:
        if counts[name]:
            fates["merged"] += 1
            if name in rejected:
                faults.append(f"{name} was rejected, and is in a recipe")
        elif name in rejected:
            fates["rejected"] += 1
        elif name in pending:
            fates["pending"] += 1
        else:
            faults.append(f"{name} was accepted and then lost")
    told = Counter(facts.accepted)
    faults += [f"{name} was accepted {count} times" for name, count in told.items() if count > 1]
    text = ", ".join(f"{fates[fate]} {fate}" for fate in ("merged", "rejected", "pending"))
    return _finding(promise, faults, f"of {len(facts.accepted)} accepted: {text}")


def _rows(facts: Facts) -> Finding:
    promise = "rows agree with recipes"
    if facts.rows is None:
        return _unknown(promise, facts, "rows")
    made_into = {
        name: version.version
        for versions in facts.versions.values()
        for version in versions
        for name, _ in version.ingredients
    }
    faults = []
    for row in facts.rows:
        found = made_into.get(row.id)
        if row.state == "merged" and found != row.settled_in:
            faults.append(f"the row says {row.id} is in version {row.settled_in}, the recipes say {found}")
        elif row.state != "merged" and found is not None:
            faults.append(f"the row says {row.id} is {row.state}, and it is in version {found}")
    return _finding(promise, faults, f"{len(facts.rows)} rows")


def _tokens(facts: Facts) -> Finding:
    faults = []
    for fragment, versions in facts.versions.items():
        total = versions[0].tokens_total if versions else 0
        for version in versions[1:]:
            total += sum(tokens for _, tokens in version.ingredients)
            if total != version.tokens_total:
                faults.append(
                    f"fragment {fragment}: version {version.version} counts {version.tokens_total} tokens, its recipes "
                    f"{total}"
                )
                break
    heads = [versions[-1].tokens_total for _, versions in sorted(facts.versions.items()) if versions]
    averaged = heads[: facts.num_averaged or len(heads)]
    merged = sum(averaged) / len(averaged) if averaged else 0.0
    if facts.tokens_merged is not None and facts.tokens_merged > merged + 1:
        faults.append(f"the summary counts {facts.tokens_merged:.0f} merged tokens, the versions {merged:.0f}")
    return _finding("tokens merged are the sum over the recipes", faults, f"{merged:,.0f} tokens, mean over fragments")


# ---------------------------------------------------------------------------------------------------------- the others


def _learners(facts: Facts) -> Finding:
    promise = "no learner applies an older version after a newer one"
    if facts.applied is None:
        return _unknown(promise, facts, "applied versions")
    faults, newest = [], dict[tuple[str, int, int], int]()
    for one in facts.applied:
        key = (one.learner, one.start, one.fragment)
        if one.version < newest.get(key, 0):
            faults.append(f"{one.learner}: fragment {one.fragment}: version {one.version} after {newest[key]}")
        newest[key] = one.version
    learners = {one.learner for one in facts.applied}
    return _finding(promise, faults, f"{len(facts.applied)} versions applied by {len(learners)} learners")


def _restarts(facts: Facts) -> Finding:
    promise = "restarts are counted"
    if facts.starts is None or not facts.num_up_starts:
        return _unknown(promise, facts, "the log of `isles up`")
    faults = []
    for child in sorted(facts.starts):
        logged = facts.starts[child] - min(facts.num_up_starts, facts.starts[child])
        counted = facts.restarts_counted.get(child, 0)
        is_right = counted == logged or (counted < logged and not facts.has_ended_in_order) or facts.num_up_starts > 1
        if not is_right:
            faults.append(f"{child} was started again {logged} times, and {counted} were counted")
    return _finding(promise, faults, f"{sum(facts.restarts_counted.values())} restarts")


def _replay(facts: Facts) -> Finding:
    promise = "the tape replays bit by bit"
    if facts.replayed is None:
        return _unknown(promise, facts, "the tape")
    different = [one for one in facts.replayed if one.difference]
    names = [digest[:12] for digest in facts.damaged_on_purpose]
    unexplained = [one for one in different if not any(name in one.difference for name in names)]
    faults = [f"fragment {one.fragment}: {one.difference}" for one in unexplained]
    num_versions = sum(max(0, one.last - one.first + 1) for one in facts.replayed)
    text = f"{num_versions} versions recomputed"
    if num_damaged := len(different) - len(unexplained):
        text += f"; {num_damaged} fragments only as far as a blob that was damaged on purpose"
    return _finding(promise, faults, text)


def _in_order(numbers: Iterable[int]) -> str:
    distinct = sorted(set(numbers))
    return ", ".join(map(str, distinct[:8])) or "none"
