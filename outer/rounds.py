"""The round machine of one fragment: what is merged, when, and with which weight. Pure, and without a single number
of the model: the arithmetic belongs to whoever performs `Merge`.

    standby -> idle -> collecting -> grace -> merging -> committing -> idle
               no row   rows, but    quorum   Merge      Commit
               pending  no quorum             ordered    ordered

A round ends committed, or abandoned: nothing passed the screen, the step was not finite, the commit was stale. Either
way the next one begins with List. Everything here may be thrown away at any moment: the store alone decides, by
comparing head and rows in its commit. Payloads are fetched and screened as their rows appear, so that a merge need not
wait for the network.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, Literal

from isles.outer.conduct import USUAL, Judgement, Limits, judge_round
from isles.outer.grace import grace_seconds, typical_step_seconds, updated
from isles.outer.ledger import clipped, make_recipe
from isles.outer.orders import (
    AskFailed,
    Commit,
    Event,
    FetchPayloads,
    ForgetPayloads,
    Hinted,
    Instruction,
    LeaseGranted,
    LeaseLost,
    List,
    Listed,
    Log,
    Merge,
    Merged,
    MergeFailed,
    PayloadScreened,
    Plan,
    Rejoined,
    ScreenPutOff,
    SetTimer,
    Settle,
    TimerFired,
)
from isles.outer.quorum import able_learners, has_everyone, has_quorum, live_learners, num_present
from isles.outer.schedule import BUFFER_RATE, fragment_progress, outer_rate
from isles.outer.verdicts import Verdicts
from isles.proto.agreement import Budget, SyncSettings
from isles.proto.ids import ContributionId
from isles.proto.messages import (
    Averages,
    Committed,
    Contribution,
    Fenced,
    LearnerInfo,
    Listing,
    Settled,
    Stale,
    VersionInfo,
)

LIST_SECONDS: Final = 2.0
"""Longest time between two looks at the store, so that a lost hint costs no more than this."""

RETRY_SECONDS: Final = 1.0
"""Pause after an answer that should not have come, so that a lasting fault does not become a busy loop."""


class State(StrEnum):
    """Where a fragment's round is."""

    STANDBY = "standby"
    IDLE = "idle"
    COLLECTING = "collecting"
    GRACE = "grace"
    MERGING = "merging"
    COMMITTING = "committing"


class Rounds:
    """All rounds of one fragment, one after the other."""

    def __init__(
        self,
        fragment: int,
        sync: SyncSettings,
        budget: Budget,
        *,
        is_buffers: bool = False,
        list_seconds: float = LIST_SECONDS,
        limits: Limits = USUAL,
        num_required: int = 0,
    ) -> None:
        """With fewer than `num_required` live learners nothing is merged; the rounds of fragment 0 say so for all."""
        self.fragment = fragment
        self.sync = sync
        self.budget = budget
        self.is_buffers = is_buffers
        self.state = State.STANDBY
        self.epoch = 0
        self._list_seconds = list_seconds
        self._limits = limits
        self._sync_seconds: float | None = None
        """How long the last merge and commit took; known only if it was ours."""
        self._num_required = num_required
        self._is_short = False
        """Whether too few learners are live."""
        self._reset()

    def _reset(self) -> None:
        """Forgets everything about the store."""
        self._head: VersionInfo | None = None
        self._version_min = 0
        """Heads below this are older than what the store has told us since."""
        self._pending: dict[ContributionId, Contribution] = {}
        self._learners: tuple[LearnerInfo, ...] = ()
        self._verdicts = Verdicts()
        self._settling: set[ContributionId] = set()
        self._is_listing = False
        self._should_list_again = False
        self._list_at = 0.0
        self._not_before = 0.0
        """Nothing is merged or settled before this moment."""
        self._timer_at: float | None = None
        self._begin_round(None)

    def _begin_round(self, head: VersionInfo | None) -> None:
        self._head = head
        self._opened_at = 0.0
        self._quorum_at = 0.0
        self._grace_seconds = 0.0
        self._averages = Averages()
        self._plan: Plan | None = None
        self._merging_since = 0.0
        self._num_live = 0
        self._dismissed: set[str] = set()
        """Learners of which a contribution to this round was rejected: nothing else is expected of them in it."""
        if self.state is not State.STANDBY:
            self.state = State.IDLE

    @property
    def is_standing_by(self) -> bool:
        """Whether the fragment is somebody else's."""
        return self.state is State.STANDBY

    # ------------------------------------------------------------------------------------------------------- the events

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Takes one event at time `now` (seconds, monotonic) and returns what is to be done about it, in order."""
        if isinstance(event, LeaseGranted):
            return self._take_lease(event.epoch, now)
        if self.state is State.STANDBY:
            return []
        if isinstance(event, LeaseLost | Fenced):
            return self._stand_by()
        out = self._take(event, now)
        if self.state in (State.IDLE, State.COLLECTING, State.GRACE):
            out += self._advance(now)
        return [*out, *self._set_timer()]

    def _take(self, event: Event, now: float) -> list[Instruction]:
        match event:
            case Hinted():
                # Of a version of our own the answer to its commit tells, or has told.
                version, is_committing = event.version, self.state is State.COMMITTING
                is_ours = version is not None and (is_committing or version <= self._version_min)
                return [] if is_ours else self._list(now)
            case Rejoined():
                self._version_min = 0
                return self._list(now)
            case TimerFired():
                self._timer_at = None
                return self._list(now) if now >= self._list_at and not self._is_listing else []
            case Listed():
                return self._take_listing(event.listing, now)
            case PayloadScreened():
                self._verdicts.take(event)
            case ScreenPutOff():
                self._verdicts.put_off(event.id)
            case Merged():
                return self._take_merged(event)
            case MergeFailed():
                return self._take_failure(event, now)
            case Settled() | Committed() | Stale() | AskFailed():
                return self._take_answer(event, now)
        return []

    def _take_answer(self, event: Settled | Committed | Stale | AskFailed, now: float) -> list[Instruction]:
        match event:
            case Settled():
                self._pending = {key: row for key, row in self._pending.items() if key not in self._settling}
                self._settling.clear()
                return self._list(now)
            case Committed():
                return self._take_committed(event, now)
            case Stale():
                self._version_min = max(self._version_min, event.head)
                return self._abandon(f"stale: {event.reason}", now)
            case AskFailed():
                return self._take_ask_failure(event, now)

    def _take_lease(self, epoch: int, now: float) -> list[Instruction]:
        if self.state is not State.STANDBY and epoch == self.epoch:
            return []
        out = self._stand_by()
        self.epoch, self.state = epoch, State.IDLE
        return [*out, *self._list(now), *self._set_timer()]

    def _stand_by(self) -> list[Instruction]:
        known = self._verdicts.ids
        self.state = State.STANDBY
        self._reset()
        return [ForgetPayloads(known)] if known else []

    # ---------------------------------------------------------------------------------------------- what the store says

    def _list(self, now: float) -> list[Instruction]:
        if self._is_listing:
            self._should_list_again = True
            return []
        self._is_listing, self._should_list_again = True, False
        self._list_at = now + self._list_seconds
        return [List()]

    def _take_listing(self, listing: Listing, now: float) -> list[Instruction]:
        self._is_listing = False
        out: list[Instruction] = self._list(now) if self._should_list_again else []
        if listing.head.version < self._version_min:
            return out or self._list(now)
        self._learners = listing.learners
        out += self._see_learners()
        self._pending = {contribution.id: contribution for contribution in listing.pending}
        out += self._forget_settled()
        if missing := self._verdicts.await_missing(listing.pending):
            out.append(FetchPayloads(missing))
        if self._plan is None and (self._head is None or self._head.version != listing.head.version):
            self._begin_round(listing.head)
        return out

    def _see_learners(self) -> list[Instruction]:
        """Notices when learners that are required go missing, and when they are back."""
        live, required = num_present(self._learners), self._num_required
        was_short, self._is_short = self._is_short, live < required
        if self.fragment != 0 or was_short == self._is_short:
            return []
        if not self._is_short:
            return [Log("info", "learners.complete", {"live": live, "required": required})]
        text = (
            f"{live} of {required} required learners are live (outer.require_learners): nothing is merged until the "
            "others are here; what learners hand in waits in the store"
        )
        return [Log("warning", "learners.missing", {"live": live, "required": required, "text": text})]

    def _forget_settled(self) -> list[Instruction]:
        """Rows that are no longer pending; those of the plan and of a settlement under way are still needed."""
        needed = self._pending.keys() | self._settling
        if self._plan is not None:
            needed.update(contribution.id for contribution in self._plan.contributions)
        gone = self._verdicts.forget_but(needed)
        return [ForgetPayloads(gone)] if gone else []

    # ------------------------------------------------------------------------------------------------------- collecting

    def _advance(self, now: float) -> list[Instruction]:
        """Goes as far as the rows and the time allow."""
        if self._head is None:
            return []
        out = self._settle(now)
        if self.state is State.IDLE and self._pending.keys() - self._settling:
            out += self._open(now)
        if self.state is State.IDLE:
            return out
        if not self._pending.keys() - self._settling:
            return [*out, *self._close_empty()]
        contributors = {contribution.id.learner for contribution in self._verdicts.passed(self._pending)}
        live = live_learners(self._learners)
        if self.state is State.GRACE and (not contributors or self._is_short):
            self.state = State.COLLECTING
        if self._is_short:
            self._opened_at = now  # how long learners were missing says nothing about how long a quorum takes
            return out
        if self.state is State.COLLECTING and self._has_quorum(contributors):
            self._start_grace(now)
        if self.state is not State.GRACE or now < self._not_before:
            return out
        is_complete = has_everyone(contributors, live) and not self._verdicts.are_awaited
        if is_complete or now >= self._quorum_at + self._grace_seconds:
            out += self._judge(now)
        return out

    def _has_quorum(self, contributors: set[str]) -> bool:
        able = able_learners(self._expected(contributors), contributors)
        return has_quorum(contributors, able, self.sync.quorum)

    def _expected(self, contributors: set[str]) -> tuple[LearnerInfo, ...]:
        gone = self._dismissed - contributors
        return tuple(info for info in self._learners if info.learner not in gone)

    def _settle(self, now: float) -> list[Instruction]:
        """Orders the rejection of what failed; its answer comes before the next such order."""
        if self._settling or now < self._not_before:
            return []
        rejections = self._verdicts.rejections(self._pending)
        if not rejections:
            return []
        self._settling = {rejection.id for rejection in rejections}
        self._dismissed.update(rejection.id.learner for rejection in rejections)
        return [Settle(self.epoch, rejections)]

    def _open(self, now: float) -> list[Instruction]:
        assert self._head is not None
        self.state, self._opened_at = State.COLLECTING, now
        first = min(self._pending.keys() - self._settling)
        return [self._log("debug", "round.opened", version=self._head.version, learner=first.learner)]

    def _close_empty(self) -> list[Instruction]:
        assert self._head is not None
        head = self._head
        reasons = sorted(one.reason for one in self._verdicts.rejections(self._settling & self._pending.keys()))
        self._begin_round(head)
        if not reasons:
            return []
        text = f"nothing passed the screen: {reasons[0]}"
        return [self._log("warning", "round.abandoned", version=head.version, reason=text)]

    def _start_grace(self, now: float) -> None:
        assert self._head is not None
        recipe = self._head.recipe
        self.state, self._quorum_at = State.GRACE, now
        self._averages = updated(
            recipe.averages if recipe is not None else Averages(),
            step_seconds=typical_step_seconds(self._learners),
            quorum_seconds=now - self._opened_at,
            sync_seconds=self._sync_seconds,
        )
        self._grace_seconds = grace_seconds(self._averages, self.sync)

    # -------------------------------------------------------------------------------------------- merging, committing

    def _judge(self, now: float) -> list[Instruction]:
        """Merges what there is, unless some of it is out of proportion: then the rest is looked at anew."""
        assert self._head is not None
        contributions = tuple(self._verdicts.passed(self._pending))
        candidates = self._verdicts.candidates(contributions, self._learners)
        judgement = judge_round(candidates, self._head, self._learners, self._limits, is_buffers=self.is_buffers)
        if not judgement.faults:
            return self._merge(contributions, judgement, now)
        self._verdicts.reject(judgement.rejections)
        if not self._has_quorum({one.id.learner for one in self._verdicts.passed(self._pending)}):
            self.state = State.COLLECTING
        return self._advance(now)

    def _merge(self, contributions: tuple[Contribution, ...], judgement: Judgement, now: float) -> list[Instruction]:
        assert self._head is not None
        progress = fragment_progress(self._head, self.budget, self.sync.num_fragments)
        recipe = make_recipe(
            contributions,
            self._expected({contribution.id.learner for contribution in contributions}),
            self.sync,
            head_version=self._head.version,
            learning_rate=BUFFER_RATE if self.is_buffers else outer_rate(self.sync, progress),
            is_buffers=self.is_buffers,
            averages=self._averages,
            grace_seconds=self._grace_seconds,
            waited_seconds=now - self._opened_at,
            judgement=judgement,
        )
        self._plan = Plan(self.fragment, self.epoch, self._head, contributions, recipe)
        self.state, self._merging_since = State.MERGING, now
        self._num_live = len(live_learners(self._learners))
        return [Merge(self._plan)]

    def _take_merged(self, event: Merged) -> list[Instruction]:
        if self.state is not State.MERGING or event.plan is not self._plan:
            return []
        self.state = State.COMMITTING
        return [Commit(event.plan, event.blobs)]

    def _take_failure(self, event: MergeFailed, now: float) -> list[Instruction]:
        if self.state is not State.MERGING or event.plan is not self._plan:
            return []
        self._verdicts.reject(event.rejections)
        if not event.rejections:
            self._not_before = now + RETRY_SECONDS
        return self._abandon(event.reason, now)

    def _take_committed(self, event: Committed, now: float) -> list[Instruction]:
        plan = self._plan
        if self.state is not State.COMMITTING or plan is None:
            return []
        self._sync_seconds = now - self._merging_since
        out: list[Instruction] = [
            self._log(
                "info",
                "round.merged",
                version=event.version,
                participants=len(plan.contributions),
                live=self._num_live,
                fraction=round(plan.recipe.fraction, 6),
                waited_seconds=round(plan.recipe.waited_seconds, 6),
                grace_seconds=round(plan.recipe.grace_seconds, 6),
            )
        ]
        for learner, factor in clipped(plan.recipe):
            fields = {"version": event.version, "learner": learner, "factor": factor}
            out.append(self._log("warning", "contribution.clipped", **fields))
        self._version_min = max(self._version_min, event.version)
        self._begin_round(None)
        for contribution in plan.contributions:
            self._pending.pop(contribution.id, None)
        return [*out, *self._forget_settled(), *self._list(now)]

    def _abandon(self, reason: str, now: float) -> list[Instruction]:
        """Ends the round without a version; the next one starts from what the store says then."""
        plan = self._plan
        if plan is None:
            return []
        self._begin_round(None)
        said = self._log("warning", "round.abandoned", version=plan.head.version, reason=reason)
        return [said, *self._list(now)]

    def _take_ask_failure(self, event: AskFailed, now: float) -> list[Instruction]:
        if event.ask == "list":
            self._is_listing = False
            self._list_at = now + self._list_seconds
            return []
        if event.ask == "settle":
            self._settling.clear()
            self._not_before = now + RETRY_SECONDS
            return []
        if self.state is not State.COMMITTING:
            return []
        self._not_before = now + RETRY_SECONDS
        return self._abandon(event.reason, now)

    # ----------------------------------------------------------------------------------------------------- time and log

    def _set_timer(self) -> list[Instruction]:
        moments = [] if self._is_listing else [self._list_at]
        if self.state is State.GRACE:
            moments.append(max(self._quorum_at + self._grace_seconds, self._not_before))
        at = min(moments, default=None)
        if at is None or at == self._timer_at:
            return []
        self._timer_at = at
        return [SetTimer(at)]

    def _log(self, level: Literal["debug", "info", "warning"], event: str, **fields: Any) -> Log:
        return Log(level, event, {"fragment": self.fragment, **fields})
