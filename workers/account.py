"""What a learner owes to the run, per fragment: the arithmetic of its unmerged work, written once.

    U = anchor - theta + residual

`U`, the account, is all work of this learner that is in no version it has applied, quantisation error included. Every
rule below keeps that sentence true (books "exact") or gives the rule as its paper has it (books "published").

Generic over what a vector is: flat fp32 tensors in the product, exact integers in the tests. Only `+`, `-` and
multiplication by a number are used, and nothing is changed in place, so a vector may be shared between threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from isles.proto.agreement import ApplyRule, Books, SyncSettings


class Vector(Protocol):
    """What the arithmetic needs of a fragment's values."""

    def __add__(self, other: Self, /) -> Self: ...
    def __sub__(self, other: Self, /) -> Self: ...
    def __mul__(self, factor: float, /) -> Self: ...


V = TypeVar("V", bound=Vector)


@dataclass(frozen=True, slots=True)
class Add(Generic[V]):
    """Change of the live parameters: add this. It does not depend on them."""

    increment: V

    def of(self, theta: V) -> V:
        """The new live parameters."""
        return theta + self.increment


@dataclass(frozen=True, slots=True)
class Replace(Generic[V]):
    """Change of the live parameters: they become this."""

    values: V

    def of(self, theta: V) -> V:
        """The new live parameters."""
        return self.values


Change = Add[V] | Replace[V]


@dataclass(slots=True)
class Account(Generic[V]):
    """The anchor and residual of one fragment; the live parameters `theta` stay with their model.

    A copy of it (`dataclasses.replace`) is a snapshot: the vectors themselves are never changed.
    """

    anchor: V
    """Values of the last version applied."""
    residual: V | None = None
    """What must be added to `anchor - theta` to get the unmerged work; None = zero, which it always is under rebase."""
    rule: ApplyRule = "rebase"
    alpha: float = 0.5
    """Share of the live parameters that blend keeps."""
    books: Books = "exact"

    @classmethod
    def under(cls, sync: SyncSettings, anchor: V, residual: V | None = None) -> Account[V]:
        """An account that follows the rules of a run."""
        return cls(anchor, residual, rule=sync.apply_rule, alpha=sync.blend_alpha, books=sync.books)

    def contribution(self, theta: V) -> V:
        """U: what a contribution made now would hold."""
        unmerged = self.anchor - theta
        return unmerged if self.residual is None else unmerged + self.residual

    def apply(self, theta_w: V, decoded: V | None, theta: Callable[[], V]) -> Change[V]:
        """Applies a newer version with values `theta_w`; returns what becomes of the live parameters.

        `decoded` is the decoded payload of this learner's contribution if this version, and none before it, contains
        it. `theta` reads the live parameters and is called only by rules that need them.
        """
        if self.is_rebased(is_own=decoded is not None):
            return self.apply_prepared(theta_w, self.increment(theta_w, decoded))
        change = self._pull(theta_w, decoded, theta())
        self.anchor = theta_w
        if self.books == "published":
            self.residual = None
        return change

    def is_rebased(self, *, is_own: bool) -> bool:
        """Whether what applying a version adds does not depend on the live parameters; `is_own`: it contains own work.

        It can then be prepared ahead: `increment`, `apply_prepared`.
        """
        return self.rule == "rebase" or (self.rule == "hybrid" and not is_own)

    def increment(self, theta_w: V, decoded: V | None) -> V:
        """What rebase adds: new theta = Theta_w - (U - dec(payload)), so the parameters hold the whole account."""
        increment = theta_w - self.anchor
        if decoded is not None:
            increment = increment + decoded
        if self.residual is not None:
            increment = increment - self.residual
        return increment

    def apply_prepared(self, theta_w: V, increment: V) -> Add[V]:
        """Applies a newer version that is rebased, given its `increment`, computed with this anchor and residual."""
        self.anchor = theta_w
        self.residual = None
        return Add(increment)

    def reset(self, newest: V | None = None) -> Replace[V]:
        """Discards all unmerged work: the live parameters become the newest version (None: the one held already)."""
        if newest is not None:
            self.anchor = newest
        self.residual = None
        return Replace(self.anchor)

    def _pull(self, theta_w: V, decoded: V | None, theta: V) -> Change[V]:
        """New theta = Theta_w, or alpha * theta + (1 - alpha) * Theta_w; new residual = U - (Theta_w - new theta)."""
        unmerged = self.contribution(theta)
        if decoded is not None:
            unmerged = unmerged - decoded
        if self.rule == "overwrite":
            self.residual = unmerged
            return Replace(theta_w)
        pulled = theta * self.alpha + theta_w * (1.0 - self.alpha)
        self.residual = unmerged - (theta_w - pulled)
        return Replace(pulled)
