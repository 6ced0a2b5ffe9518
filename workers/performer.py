"""Does to the model what the session orders, in the training thread, between two inner steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch.optim import Optimizer

from isles.proto.clock import Clock
from isles.proto.errors import ConfigError, FencedError, RefusedError, UnreachableError
from isles.proto.ids import ContributionId
from isles.proto.logs import Logger
from isles.workers.account import Account, Add
from isles.workers.checkpoint import Checkpoint
from isles.workers.courier import Courier, Forget, Want
from isles.workers.description import BufferSlot
from isles.workers.encoding import Encode
from isles.workers.flat import FlatModel, Parted
from isles.workers.mailbox import Arrival
from isles.workers.orders import (
    ApplyVersion,
    AskVersion,
    Await,
    Boundary,
    Event,
    ForgetPayload,
    FragmentSpoiled,
    Instruction,
    Log,
    PayloadEncoded,
    PayloadFailed,
    Reset,
    Stop,
    TakeAccount,
)
from isles.workers.session import NOT_FINITE, Session
from isles.workers.versions import Held

AWAIT_SECONDS: Final = 120.0
"""Longest wait of a deterministic run for the version it has to apply: a round takes far less, a stuck one for ever."""


SLICE_SECONDS: Final = 0.2
"""Longest wait without a look at whether to stop."""


class Performer:
    """Brings facts from the courier to the session, and its orders to the model. Belongs to the training thread."""

    def __init__(
        self,
        session: Session,
        flat: FlatModel,
        optimizer: Optimizer,
        buffers: Mapping[str, BufferSlot],
        *,
        should_stop: Callable[[], bool],
        clock: Clock,
        log: Logger,
    ) -> None:
        """`buffers` are all those of the model's state, by name; checkpoints have them. `should_stop` ends waits."""
        self._session = session
        self._flat = flat
        self._optimizer = optimizer
        self._buffers = buffers
        self._should_stop = should_stop
        self._clock = clock
        self._log = log
        self.accounts: dict[int, Account[torch.Tensor]] = {}
        """By fragment; other threads only look."""
        self._arrivals: dict[int, Arrival] = {}
        self._free_buffers: list[_Buffer] = []
        self._lent_buffers: dict[ContributionId, _Buffer] = {}
        self._awaited: set[int] = set()
        self._is_looking = False
        self._courier: Courier | None = None

    @property
    def courier(self) -> Courier:
        """Where facts come from and copies go."""
        assert self._courier is not None, "the courier is made after the checkpoint was restored"
        return self._courier

    @courier.setter
    def courier(self, courier: Courier) -> None:
        self._courier = courier

    @property
    def held(self) -> dict[int, Held]:
        """Fragment -> the version held, for those that a checkpoint restored."""
        return {
            fragment: Held(self._session.versions[fragment], account.anchor)
            for fragment, account in self.accounts.items()
        }

    # ---------------------------------------------------------------------------------------------------------- facts

    def take_mail(self) -> None:
        """Tells the session what the courier has for it. Raises what ended the courier."""
        mailbox = self.courier.mailbox
        if mailbox.failure is not None:
            raise mailbox.failure
        if mailbox.is_empty:
            return
        facts, arrivals = mailbox.take()
        for arrival in arrivals:
            self._arrivals[arrival.event.fragment] = self._without_what_is_done(arrival)
        for fact in (*facts, *(arrival.event for arrival in arrivals)):
            if isinstance(fact, PayloadEncoded | PayloadFailed):
                self._free_buffers.append(self._lent_buffers.pop(fact.id))
            self.tell(fact)

    def _without_what_is_done(self, arrival: Arrival) -> Arrival:
        """A version that was applied while it was handed over once more, for its row, keeps no fragment in memory."""
        account = self.accounts.get(arrival.event.fragment)
        is_held = account is not None and account.anchor is arrival.values
        return replace(arrival, decoded=None, increment=None) if is_held else arrival

    def tell(self, event: Event) -> None:
        """Tells the session one thing and does what it orders."""
        self.perform(self._session.handle(event, self._clock.now()))

    def wait_if_told(self) -> None:
        """A deterministic run applies each version at its own step, and waits for it there, unless it is to stop."""
        if not self._awaited:
            return
        deadline = self._clock.now() + AWAIT_SECONDS
        while self._awaited and not self._should_stop():
            self._wait(deadline, f"the version with this learner's contribution to fragment {min(self._awaited)}")
            self.take_mail()
            self._awaited.clear()
            self.tell(Boundary())

    def _wait(self, deadline: float, what: str) -> None:
        """Returns when there is mail, or a stop was requested. Raises UnreachableError after the deadline."""
        while not self.courier.mailbox.wait(min(SLICE_SECONDS, deadline - self._clock.now())):
            if self._clock.now() < deadline:
                if self._should_stop():
                    return
                continue
            raise UnreachableError(
                f"{what} did not come within {AWAIT_SECONDS:g} s, and there is no way on without it: are broker and "
                "outer running?"
            )

    # ---------------------------------------------------------------------------------------------------------- orders

    def perform(self, instructions: Sequence[Instruction]) -> None:
        """Does what the session orders. Raises FencedError or RefusedError if that is to stop."""
        if not instructions:
            return
        for one in instructions:
            match one:
                case TakeAccount():
                    self._take_account(one)
                case ApplyVersion():
                    self._apply(one)
                case Reset():
                    self._reset(one)
                case AskVersion(fragment=fragment):
                    self.courier.submit(Want(fragment))
                case ForgetPayload(id=closed):
                    self.courier.submit(Forget(closed), is_urgent=False)
                case Await(fragment=fragment):
                    self._awaited.add(fragment)
                case Log(level=level, event=event, fields=fields):
                    getattr(self._log, level)(event, **fields)
                case Stop(is_fenced=is_fenced, text=text):
                    raise (FencedError if is_fenced else RefusedError)(text)
        if any(isinstance(one, Reset) and one.is_not_finite for one in instructions):
            self._look_for_spoiled()

    def _take_account(self, order: TakeAccount) -> None:
        """The one copy: live parameters to the host. The courier computes U from it and from the anchor."""
        buffer = self._free_buffers.pop() if self._free_buffers else _Buffer(self._flat)
        self._lent_buffers[order.id] = buffer
        theta = buffer.parted(order.fragment)
        self._flat.gather_parted(order.fragment, theta)
        self.courier.submit(Encode(order, replace(self.accounts[order.fragment]), theta.values))

    def _apply(self, order: ApplyVersion) -> None:
        """Adds what was prepared, if nothing has changed since; else goes by the account's rule."""
        arrival = self._arrivals.pop(order.fragment)
        assert arrival.event.version == order.version
        account, increment, is_own = self.accounts[order.fragment], arrival.increment, order.subtract is not None
        if increment is not None and increment.is_of(account, is_own=is_own):
            self._flat.add_parted(order.fragment, increment.added)
            account.apply_prepared(arrival.values, increment.added.values)
            return
        decoded = None
        if order.subtract is not None:
            decoded = arrival.decoded if increment is None else self.courier.decode_own(order.subtract)
            assert decoded is not None, "the courier has the payload of every open contribution"
        self._apply_in_pieces(order.fragment, arrival.values, decoded)

    def _apply_in_pieces(self, fragment: int, values: torch.Tensor, decoded: torch.Tensor | None) -> None:
        """The rules go value by value, so what they need meanwhile is no longer than a piece of the fragment.

        A residual is written where `decoded` was, which nobody else has.
        """
        account, residual = self.accounts[fragment], None
        for piece in self._flat.pieces(fragment):
            span, rest = piece.values, account.residual
            part = replace(account, anchor=account.anchor[span], residual=None if rest is None else rest[span])
            change = part.apply(
                values[span],
                None if decoded is None else decoded[span],
                partial(self._flat.gather_piece, piece),
            )
            if isinstance(change, Add):
                self._flat.add_piece(piece, change.increment)
            else:
                self._flat.scatter_piece(piece, change.values)
            if part.residual is not None:
                if residual is None:
                    residual = torch.empty_like(values) if decoded is None else decoded
                residual[span] = part.residual
        account.anchor, account.residual = values, residual

    def _reset(self, order: Reset) -> None:
        newest = None
        if order.version is not None:
            arrival = self._arrivals[order.fragment]
            assert arrival.event.version == order.version
            newest = arrival.values
        account = self.accounts.get(order.fragment)
        if account is None:
            assert newest is not None, "a fragment that holds nothing is reset to a version"
            account = self.accounts[order.fragment] = self._open_account(order.fragment, newest)
        self._flat.scatter(order.fragment, account.reset(newest).values)
        if order.is_not_finite:
            for parameter in self._flat.parameters(order.fragment):
                self._optimizer.state.pop(parameter, None)

    def _open_account(
        self, fragment: int, anchor: torch.Tensor, residual: torch.Tensor | None = None
    ) -> Account[torch.Tensor]:
        """Buffers are rebased whatever the run's rule: what another one keeps back of them is soon out of date."""
        if self._flat.fragments[fragment].is_buffers:
            return Account(anchor, residual)
        return Account.under(self._session.sync, anchor, residual)

    def _look_for_spoiled(self) -> None:
        """NaN in one fragment comes back through the gradients unless every spoiled fragment is reset with it."""
        if self._is_looking:
            return
        self._is_looking = True
        reason = f"{NOT_FINITE}: NaN or infinity in the parameters"
        for fragment in self.accounts:
            if not self._flat.is_finite(fragment):
                self.tell(FragmentSpoiled(fragment, reason))
        self.tell(Boundary())
        self._is_looking = False

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def cut(
        self, learner: str, incarnation: str, run: str, manifest_digest: str, tokens: int, *, is_last: bool = False
    ) -> Checkpoint | None:
        """Copies everything at this boundary; None while a payload is still being encoded: try at the next one.

        Nothing new is contributed in between, so that will be soon. The last cut waits instead, and those of a
        deterministic run.
        """
        deadline = self._clock.now() + AWAIT_SECONDS
        while self._lent_buffers and (is_last or self._session.sync.is_deterministic):
            self._wait(deadline, "a payload of this worker's courier")
            self.take_mail()
        self._session.is_holding_back = bool(self._lent_buffers)
        if self._lent_buffers:
            return None
        books = self._session.checkpoint_books()
        opened = [one.open.id for one in books if one.open is not None and one.open.has_payload]
        accounts = self.accounts.items()
        lives: dict[str, torch.Tensor] = {}
        lags: dict[str, torch.Tensor] = {}
        for fragment in self.accounts:
            for kept, found in zip((lives, lags), self._flat.rounded(fragment), strict=True):
                kept.update(found)
        return Checkpoint(
            learner=learner,
            run=run,
            manifest_digest=manifest_digest,
            incarnation=incarnation,
            num_steps=self._session.num_steps,
            tokens=tokens,
            cursor=dict(self._session.cursor),
            books=books,
            thetas={fragment: self._flat.gather(fragment) for fragment in self.accounts},
            anchors={fragment: account.anchor for fragment, account in accounts},
            residuals={fragment: one.residual for fragment, one in accounts if one.residual is not None},
            payloads={named: self.courier.payloads[named] for named in opened},
            lives=lives,
            lags=lags,
            buffers={name: one for name, slot in self._buffers.items() if (one := slot.saved()) is not None},
            optimizer_name=type(self._optimizer).__name__,
            optimizer_state=_copied(self._optimizer.state_dict()),
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Takes what the session goes on with; fragments that start over will take the head instead.

        Raises ConfigError if the checkpoint is of another inner optimizer.
        """
        name = type(self._optimizer).__name__
        if checkpoint.optimizer_name != name:
            raise ConfigError(
                f"the checkpoint of learner {checkpoint.learner} has the state of {checkpoint.optimizer_name}, this "
                f"worker trains with {name}: use the same inner optimizer, or another checkpoint folder"
            )
        self._optimizer.load_state_dict(checkpoint.optimizer_state)
        for buffer, values in checkpoint.buffers.items():
            if buffer in self._buffers:
                self._buffers[buffer].put(values)
        for fragment in self._session.versions:
            anchor, residual = checkpoint.anchors[fragment], checkpoint.residuals.get(fragment)
            self.accounts[fragment] = self._open_account(fragment, anchor, residual)
            self._flat.restore(fragment, checkpoint.thetas[fragment], checkpoint.lives, checkpoint.lags)


class _Buffer:
    """Memory on the host for a copy of any fragment of the live parameters."""

    def __init__(self, flat: FlatModel) -> None:
        is_pinned = flat.device.type == "cuda"
        self._flat = flat
        self._values = torch.empty(max(flat.num_values), dtype=torch.float32, pin_memory=is_pinned)
        self._parted: dict[int, Parted] = {}

    def parted(self, fragment: int) -> Parted:
        """Its beginning, as a vector of that fragment."""
        if fragment not in self._parted:
            self._parted[fragment] = self._flat.parted(fragment, self._values)
        return self._parted[fragment]


def _copied(tree: Any) -> Any:
    """The same containers with copies of the tensors on the host."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True).contiguous()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_copied(value) for value in tree)
    return tree
