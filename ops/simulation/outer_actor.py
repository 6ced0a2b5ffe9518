"""An outer of the simulated world: the real client core, and a desk for each fragment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from isles.ops.simulation.desk import Desk, Found, NotHad
from isles.ops.simulation.values import Lane, Pair, counted, ref_of
from isles.outer import orders
from isles.outer.services import Unavailable
from isles.proto.agreement import RunRecord
from isles.proto.client import Answered, Client, Fetched, FetchFailed, Hinted, Instruction, Send, Welcomed
from isles.proto.messages import BlobRef, Hello, Lease, Leased, Message, Stored, Upload

BYTES_MAX = 1 << 20


@dataclass(eq=False)
class _Bringing:
    """Some blobs that are being fetched."""

    missing: set[str]
    then: Callable[[Found], None]
    found: dict[str, bytes] = field(default_factory=dict)


@dataclass
class OuterActor:
    """One incarnation of one outer. The world calls `receive` and `tick`, and carries what is in `outbox`."""

    name: str
    incarnation: str
    record: RunRecord
    is_poisoned: Callable[[Lane, str], bool]
    """(lane, outer) -> whether this outer rejects a contribution with this item: opinions differ."""
    draw_token: Callable[[], str]
    remade: list[int] = field(default_factory=list)
    """Takes note of each version that was recomputed from the tape."""
    outbox: list[Send] = field(default_factory=list)
    num_kept: int = 0
    """Blobs that are not fetched again."""
    given_up: str = ""
    """Why it cannot go on, if it cannot."""
    _now: float = 0.0

    def __post_init__(self) -> None:
        self.client = Client(Hello(role="outer", id=self.name, incarnation=self.incarnation))
        fragments = range(self.record.sync.num_fragments)
        self.desks = {
            fragment: Desk(fragment, self.record, self, self._is_spoiled, self.remade) for fragment in fragments
        }
        self._kept: dict[str, bytes] = {}
        self._bringing: list[_Bringing] = []
        self._asked: list[tuple[Message, Callable[[Message], None]]] = []

    def _is_spoiled(self, delta: Pair) -> bool:
        return any(self.is_poisoned(lane, self.name) for lane in counted(delta.lanes))

    # --------------------------------------------------------------------------------------------- what the world calls

    def start(self, now: float) -> None:
        self._now = now
        self._carry_out(self.client.start(now))

    def receive(self, message: Message, payload: bytes | None, now: float) -> None:
        self._now = now
        self._carry_out(self.client.handle(message, now, payload))

    def tick(self, now: float) -> None:
        self._now = now
        self._carry_out(self.client.tick(now))
        for desk in self.desks.values():
            desk.tick()

    def lease(self, now: float) -> None:
        """Asks for the leases."""
        self._now = now
        if not self.client.is_asking(Lease):
            self._ask_leases()

    def renew(self, now: float) -> None:
        """Asks for the leases, and looks at every fragment whatever was hinted."""
        self.lease(now)
        for desk in self.desks.values():
            desk.handle(orders.Hinted())

    def checkpoint(self, fragment: int, now: float) -> None:
        """Begins a checkpoint of whatever this outer holds of a fragment."""
        self._now = now
        self.desks[fragment].checkpoint()

    # --------------------------------------------------------------------------------------------- what desks are lent

    def now(self) -> float:
        return self._now

    def ask(self, message: Message, then: Callable[[Message], None], payload: bytes | None = None) -> None:
        self._asked.append((message, then))
        self._carry_out(self.client.ask(message, self._now, payload))

    def bring(self, blobs: Sequence[BlobRef], then: Callable[[Found], None]) -> None:
        found = {blob.digest: self._kept[blob.digest] for blob in blobs if blob.digest in self._kept}
        missing = [blob for blob in blobs if blob.digest not in found]
        if not missing:
            then(found)
            return
        self._bringing.append(_Bringing({blob.digest for blob in missing}, then, found))
        for blob in missing:
            self._carry_out(self.client.fetch(blob, self._now, bytes_max=BYTES_MAX))

    def store(self, values: Sequence[Pair], then: Callable[[str], None]) -> None:
        left = list(values)

        def take(reply: Message) -> None:
            if not isinstance(reply, Stored):
                then(f"the answer is {type(reply).__name__}")
            elif left:
                value = left.pop(0)
                self.ask(Upload(blob=ref_of(value)), take, value.encode())
            else:
                then("")

        value = left.pop(0)
        self.ask(Upload(blob=ref_of(value)), take, value.encode())

    def give_up(self, reason: str) -> None:
        self.given_up = reason

    # ------------------------------------------------------------------------------------------------- news of the core

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send():
                    self.outbox.append(instruction)
                case Welcomed():
                    for desk in self.desks.values():
                        desk.handle(orders.Rejoined())
                    self._ask_leases()
                case Answered(ask, reply):
                    self._take_answer(ask, reply)
                case Fetched(blob, data):
                    self._take_blob(blob.digest, bytes(data))
                case FetchFailed(blob, text, code):
                    self._take_failure(NotHad(blob.digest, Unavailable(code, text)))
                case Hinted(hint) if hint.kind in ("contribution", "version"):
                    version = hint.version if hint.kind == "version" else None
                    self.desks[hint.fragment].handle(orders.Hinted(version))

    def _ask_leases(self) -> None:
        self.ask(Lease(fragments=tuple(self.desks)), self._take_leases)

    def _take_leases(self, reply: Message) -> None:
        if not isinstance(reply, Leased):
            return
        for fragment, desk in self.desks.items():
            epoch = reply.epochs.get(fragment)
            desk.handle(orders.LeaseLost() if epoch is None else orders.LeaseGranted(epoch))

    def _take_answer(self, ask: Message, reply: Message) -> None:
        for asked in list(self._asked):
            if asked[0] is ask:
                self._asked.remove(asked)
                asked[1](reply)

    def _take_blob(self, digest: str, data: bytes) -> None:
        self._kept[digest] = data
        while len(self._kept) > self.num_kept:
            del self._kept[next(iter(self._kept))]
        for bringing in [one for one in self._bringing if digest in one.missing]:
            bringing.missing.discard(digest)
            bringing.found[digest] = data
            if not bringing.missing:
                self._bringing.remove(bringing)
                bringing.then(bringing.found)

    def _take_failure(self, failure: NotHad) -> None:
        for bringing in [one for one in self._bringing if failure.digest in one.missing]:
            self._bringing.remove(bringing)
            bringing.then(failure)
