"""What the screen has found out about the pending contributions of one fragment. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from isles.outer.conduct import Candidate
from isles.outer.orders import PayloadScreened
from isles.outer.weights import by_name, token_weight
from isles.proto.ids import ContributionId
from isles.proto.messages import Contribution, LearnerInfo, Rejection


class Verdicts:
    """Verdicts that are known, and those that are awaited."""

    def __init__(self) -> None:
        self._known: dict[ContributionId, PayloadScreened] = {}
        self._awaited: set[ContributionId] = set()

    @property
    def are_awaited(self) -> bool:
        """Whether any verdict is still to come."""
        return bool(self._awaited)

    @property
    def ids(self) -> tuple[ContributionId, ...]:
        """All contributions with a verdict, or with one to come, in order."""
        return tuple(sorted({*self._known, *self._awaited}))

    def await_missing(self, pending: Iterable[Contribution]) -> tuple[Contribution, ...]:
        """Those that have to be screened; their verdicts are awaited from then on."""
        missing = tuple(one for one in pending if one.id not in self._known and one.id not in self._awaited)
        self._awaited.update(one.id for one in missing)
        return missing

    def take(self, verdict: PayloadScreened) -> None:
        """A verdict came; one that nobody awaits means nothing any more."""
        if verdict.id in self._awaited:
            self._awaited.remove(verdict.id)
            self._known[verdict.id] = verdict

    def put_off(self, contribution_id: ContributionId) -> None:
        """It could not be screened now."""
        self._awaited.discard(contribution_id)

    def reject(self, rejections: Iterable[Rejection]) -> None:
        """What passed the screen alone turned out not to fit to be merged."""
        for one in rejections:
            self._known[one.id] = PayloadScreened(one.id, one.reason, one.kind)

    def forget_but(self, needed: Collection[ContributionId]) -> tuple[ContributionId, ...]:
        """Forgets all others, and says which."""
        gone = tuple(name for name in self.ids if name not in needed)
        for name in gone:
            self._known.pop(name, None)
            self._awaited.discard(name)
        return gone

    def passed(self, pending: Mapping[ContributionId, Contribution]) -> list[Contribution]:
        """The pending ones that may be merged, in sorted id order."""
        return [pending[name] for name in sorted(pending) if name in self._known and not self._known[name].reason]

    def rejections(self, pending: Collection[ContributionId]) -> tuple[Rejection, ...]:
        """Of the pending ones that may not be merged, in sorted id order."""
        failed = [self._known[name] for name in sorted(pending) if name in self._known and self._known[name].reason]
        return tuple(Rejection(id=one.id, reason=one.reason, kind=one.kind) for one in failed)

    def candidates(
        self, contributions: Sequence[Contribution], learners: Sequence[LearnerInfo]
    ) -> tuple[Candidate, ...]:
        """What is judged of contributions that passed."""
        known = by_name(learners)
        return tuple(
            Candidate(
                one,
                token_weight(one, known.get(one.id.learner)),
                self._known[one.id].norm,
                self._known[one.id].sketch,
            )
            for one in contributions
        )
