"""When enough learners have contributed to a round, and when all have. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from isles.proto.messages import LearnerInfo


def live_learners(learners: Sequence[LearnerInfo]) -> frozenset[str]:
    """The names of those that the broker has heard of lately."""
    return frozenset(info.learner for info in learners if info.is_live)


def able_learners(learners: Sequence[LearnerInfo], contributors: Collection[str]) -> frozenset[str]:
    """Live learners that have contributed or still may.

    Two draining learners that each wait for the other's contribution would wait for ever, so one that has nothing left
    does not raise the quorum.
    """
    return frozenset(
        info.learner for info in learners if info.is_live and (not info.is_draining or info.learner in contributors)
    )


def num_present(learners: Sequence[LearnerInfo]) -> int:
    """How many learners are here, for a run that must not go on with fewer.

    Those that are live. Once none of them trains any more, those that have handed in everything and left count as well:
    the last work of a run that ends in order would wait for them for ever.
    """
    num_live = sum(info.is_live for info in learners)
    if any(info.is_live and not info.is_draining for info in learners):
        return num_live
    return num_live + sum(info.is_draining and not info.is_live for info in learners)


def num_needed(quorum: int, num_able: int) -> int:
    """K, but never more than could contribute, and at least one."""
    return max(1, min(quorum, num_able))


def has_quorum(contributors: Collection[str], able: frozenset[str], quorum: int) -> bool:
    """Whether enough distinct learners have a mergeable row.

    A dead owner's row counts: it is durable, and its work is as good as anybody's. Without live learners any row is
    enough, or what the dead have left would wait for ever.
    """
    return len(set(contributors)) >= num_needed(quorum, len(able))


def has_everyone(contributors: Collection[str], live: frozenset[str]) -> bool:
    """Whether nobody is left to wait for."""
    return live <= set(contributors)
