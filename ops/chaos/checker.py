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
    base_versions: tuple[int, ...] = ()
    """Of each ingredient: the version that its learner held when it was made."""


@dataclass(frozen=True, slots=True)
class RowFact:
    """The permanent row of one learner and fragment."""

    id: ContributionId
    state: str
    settled_in: int | None = None


@dataclass(frozen=True, slots=True)
class HeldFact:
    """A learner logged that it holds this version; `start` counts the starts of its process."""

    learner: str
    start: int
    fragment: int
    version: int
    is_joining: bool = False
    """Whether it had not joined yet: on its way to the head it holds what its checkpoint had."""


@dataclass(frozen=True, slots=True)
class ReplayFact:
    """What came of recomputing one fragment."""

    fragment: int
    first: int
    last: int
    difference: str = ""
    is_outrun: bool = False
    """Whether a running broker let go of the rest before it was reached, which breaks no promise."""


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
    held: Sequence[HeldFact] = ()
    """In the order of each learner's log."""
    is_deterministic: bool = False
    """A learner of such a run that is started again goes through the versions after its checkpoint once more."""
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
    is_going_on: bool = False
    """Whether the run had not ended. Then the versions and rows are those of one moment after all lines of the logs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise and what became of it."""

    promise: str
    verdict: Verdict
    text: str
    at_end: str = ""
    """What only the end of a run that is going on can tell: half a sentence; empty = nothing."""


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


def _finding(promise: str, faults: Sequence[str], text: str, at_end: str = "") -> Finding:
    if not faults:
        return Finding(promise, "holds", text, at_end)
    rest = f"; and {len(faults) - EXAMPLES_SHOWN} more" if len(faults) > EXAMPLES_SHOWN else ""
    return Finding(promise, "broken", "; ".join(faults[:EXAMPLES_SHOWN]) + rest, at_end)


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
    pending, outdone = _pending(facts), _outdone(facts)
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
        elif name in outdone:
            fates["settled since the log was read"] += 1
        else:
            faults.append(f"{name} was accepted and then lost")
    told = Counter(facts.accepted)
    faults += [f"{name} was accepted {count} times" for name, count in told.items() if count > 1]
    always = ("merged", "rejected", "pending")
    text = ", ".join(f"{fates[fate]} {fate}" for fate in (*always, *(fates.keys() - always)))
    at_end = "what becomes of the pending ones" if facts.is_going_on and fates["pending"] else ""
    return _finding(promise, faults, f"of {len(facts.accepted)} accepted: {text}", at_end)


def _newest_accepted(facts: Facts) -> set[ContributionId]:
    """That of each learner and fragment."""
    return set({(name.learner, name.fragment): name for name in facts.accepted or ()}.values())


def _pending(facts: Facts) -> set[ContributionId]:
    """Those that are, or without rows those that may be: the newest of each learner and fragment."""
    if facts.rows is None:
        return _newest_accepted(facts)
    return {row.id for row in facts.rows if row.state == "pending"}


def _outdone(facts: Facts) -> set[ContributionId]:
    """Of a run that goes on: those whose rows have a later contribution, accepted after the broker's log was read, so
    that a line about their rejection may have come after it, too.
    """
    rows = {(row.id.learner, row.id.fragment): row.id for row in facts.rows or ()} if facts.is_going_on else {}
    return {
        name
        for name in _newest_accepted(facts)
        if (found := rows.get((name.learner, name.fragment))) is not None
        and (found.incarnation != name.incarnation or found.number > name.number)
    }


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
    at_end = "whether the summary counts as many tokens" if facts.is_going_on else ""
    text = f"{merged:,.0f} tokens, mean over fragments"
    return _finding("tokens merged are the sum over the recipes", faults, text, at_end)


# ---------------------------------------------------------------------------------------------------------- the others


def _learners(facts: Facts) -> Finding:
    """What a contribution is based on was held by its learner, so the recipes alone tell much; logs tell the rest."""
    promise = "no learner applies an older version after a newer one"
    made_from = [
        (fragment, version.version, name.learner, base)
        for fragment, versions in facts.versions.items()
        for version in versions
        for (name, _), base in zip(version.ingredients, version.base_versions, strict=False)
    ]
    if not made_from and not facts.held:
        return _unknown(promise, facts, "versions of learners")
    learners = {learner for _, _, learner, _ in made_from} | {one.learner for one in facts.held}
    text = f"bases of {len(made_from)} contributions and {len(facts.held)} log entries of {len(learners)} learners"
    return _finding(promise, [*_base_faults(made_from), *_held_faults(facts)], text)


def _base_faults(made_from: Iterable[tuple[int, int, str, int]]) -> Iterable[str]:
    """A learner contributes to a fragment in order, and a restarted one goes on from what its last accepted
    contribution was based on, or from the head: no base is ever older than the one before it.
    """
    newest = dict[tuple[int, str], int]()
    for fragment, version, learner, base in made_from:
        before = newest.get((fragment, learner), 0)
        if base < before:
            yield f"{learner}: fragment {fragment}: what is in version {version} is based on {base}, after {before}"
        elif base >= version:
            yield f"{learner}: fragment {fragment}: what is in version {version} is based on {base}"
        newest[fragment, learner] = max(before, base)


def _held_faults(facts: Facts) -> Iterable[str]:
    """Within a start versions only grow. A learner has joined when it holds the heads of that moment, which are as new
    as anything that it held in earlier starts.
    """
    here, before = dict[tuple[str, int], tuple[int, int]](), dict[tuple[str, int], int]()
    for one in facts.held:
        key = (one.learner, one.fragment)
        start, newest = here.get(key, (one.start, 0))
        if start != one.start:
            before[key] = max(before.get(key, 0), newest)
            newest = 0
        has_to_be_newest = not one.is_joining and not facts.is_deterministic
        least = max(newest, before.get(key, 0)) if has_to_be_newest else newest
        if one.version < least:
            yield f"{one.learner}: fragment {one.fragment}: version {one.version} after {least}"
        here[key] = one.start, max(newest, one.version)


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
    num = sum(facts.restarts_counted.values())
    at_end = "whether all restarts were counted, which is written down now and then" if facts.is_going_on else ""
    return _finding(promise, faults, "1 restart" if num == 1 else f"{num} restarts", at_end)


def _replay(facts: Facts) -> Finding:
    promise = "the tape replays bit by bit"
    if facts.replayed is None:
        return _unknown(promise, facts, "the tape")
    names = [digest[:12] for digest in facts.damaged_on_purpose]
    faults, losses = [], []
    for one in facts.replayed:
        damaged = next((name for name in names if name in one.difference), "")
        if one.is_outrun:
            losses.append(f"fragment {one.fragment} only up to {one.last}: {one.difference}")
        elif damaged:
            losses.append(f"fragment {one.fragment} only up to {one.last}, as blob {damaged} was damaged on purpose")
        elif one.difference:
            faults.append(f"fragment {one.fragment}: {one.difference}")
    num_versions = sum(max(0, one.last - one.first + 1) for one in facts.replayed)
    return _finding(promise, faults, "; ".join([f"{num_versions} versions recomputed", *losses]))


def _in_order(numbers: Iterable[int]) -> str:
    distinct = sorted(set(numbers))
    return ", ".join(map(str, distinct[:8])) or "none"
