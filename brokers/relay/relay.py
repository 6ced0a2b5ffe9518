"""A relay's core: what it does with each thing that happens. Pure.

    small messages      pass to the home broker and back (passing.py)
    payloads upward     are stored here, then handed over, whoever is there by then (offering.py, forwarding.py)
    payloads downward   are fetched once and served from the cache (fetching.py)
    hints               pass unchanged

It is a broker to its region, and a client of its home broker, of the same protocol; nothing else is needed.
"""

from __future__ import annotations

from typing import Final, assert_never

from isles.brokers.relay import beating, fetching, forwarding, offering
from isles.brokers.relay.limits import RelayingSettings
from isles.brokers.relay.passing import PASSED_REQUESTS_FROM, Passed
from isles.brokers.relay.state import FETCHED_FROM, Kept, RelayState
from isles.brokers.relay.upstream import News
from isles.brokers.relay.vocabulary import (
    BlobMapped,
    BlobUnmappable,
    DropOffer,
    End,
    Event,
    HomeSaid,
    Instruction,
    LinkDenied,
    OfferKept,
    OfferNotKept,
    RelayDiskEvent,
    SendUp,
)
from isles.brokers.replies import joined_log, log, refuse, reply
from isles.brokers.vocabulary import (
    ChunkRead,
    ChunkWritten,
    GarbageArrived,
    MessageArrived,
    Publish,
    ReadFailed,
    Send,
    Tick,
    UploadDurable,
    UploadFailed,
)
from isles.proto.client import Answered, Fetched, FetchFailed, Hinted, Refused, Welcomed
from isles.proto.ids import Name, Token
from isles.proto.keys import AllowList
from isles.proto.messages import (
    AskStatus,
    Channel,
    Chunk,
    Credit,
    Done,
    Error,
    Fetch,
    Hello,
    Leave,
    Offer,
    RelayBeat,
    RetryAfter,
    Role,
    Upload,
    Welcome,
)

AT_HOME: Final[frozenset[Role]] = frozenset({"outer", "relay"})
"""Who talks to the home broker itself."""
RELIEVED: Final = 0.75
"""Of the outbox: once it is filled less than that, offers that were put off are said to be taken again."""


class Relay:
    """One relay process's core."""

    def __init__(
        self,
        name: Name,
        settings: RelayingSettings,
        incarnation: Token,
        now: float,
        *,
        has_keys: bool = False,
        kept: Kept = Kept(),  # noqa: B008 - frozen
    ) -> None:
        """`incarnation` is random per start of the process, `now` monotonic in seconds, `kept` what is on its disk."""
        self.state = RelayState(name, settings, incarnation, has_keys, now)
        self.beats = beating.Beats(now)
        self._kept = kept

    def start(self) -> list[Instruction]:
        """Takes up what an earlier process left, and says HELLO to the home broker."""
        state, kept = self.state, self._kept
        orders = self._take_up(kept)
        if state.has_keys:
            state.doors.allowed = AllowList()
            if kept.keys is not None:
                beating.take_keys(state, kept.keys)
        for link, client in enumerate(state.links.clients):
            orders += state.links.split(link, client.start(state.now))[0]
        return [*orders, *forwarding.forward(state)]

    def _take_up(self, kept: Kept) -> list[Instruction]:
        state = self.state
        present = {blob.digest: blob for blob in kept.blobs}
        orders: list[Instruction] = []
        for offer in kept.offers:
            blob = offer.contribution.blob
            if present.get(blob.digest) == blob:
                state.outbox.put(offer, "waiting")
            else:
                orders.append(DropOffer(offer.contribution.id, blob))
        for blob in kept.blobs:
            if not state.outbox.holds(blob.digest):
                state.cache.put(blob)
        return [*orders, *state.make_room()]

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Takes one event."""
        self.state.now = now
        match event:
            case MessageArrived():
                return self._hear(event)
            case GarbageArrived():
                error = self.state.doors.key_error(event.key)
                return [*refuse(event, error or Error(code="bad-message", text=event.text))]
            case HomeSaid():
                return self._hear_home(event)
            case LinkDenied(text):
                return [End("denied", text)]
            case Tick():
                return self._tick(event)
            case _:
                return self._hear_disk(event)

    # -------------------------------------------------------------------------------------------------- from the region

    def _hear(self, arrival: MessageArrived) -> list[Instruction]:
        state, message = self.state, arrival.message
        if error := state.doors.key_error(arrival.key):
            return [*refuse(arrival, error)]
        if isinstance(message, Hello) and arrival.channel is Channel.CONTROL:
            return self._hear_hello(arrival, message)
        if isinstance(message, AskStatus) and arrival.channel is Channel.CONTROL:
            return self._pass_on(arrival, "")
        session = state.sessions.get(message.session)
        if session is None:
            text = "this relay does not know the session; was it restarted? Say HELLO"
            return [*refuse(arrival, Error(code="unknown-session", text=text), level="info")]
        if error := state.doors.session_error(arrival.key, session):
            return [*refuse(arrival, error)]
        state.sessions.hear(session, arrival.channel, arrival.connection, state.now, arrival.key)
        match arrival.channel, message:
            case Channel.CONTROL, Offer():
                return offering.take_offer(state, session, arrival, message)
            case Channel.CONTROL, Upload():
                return offering.take_upload(state, session, arrival, message)
            case Channel.CONTROL, _:
                return self._pass_on(arrival, session.key_name)
            case Channel.BULK, Chunk():
                return offering.take_chunk(state, session, arrival, message)
            case Channel.BULK, Fetch():
                return fetching.take_fetch(state, session, arrival, message)
            case Channel.BULK, Credit():
                return fetching.take_credit(state, session, message)
        text = f"{session.role} {session.id} may not send {type(message).__name__} on the {arrival.channel} channel"
        return [*refuse(arrival, Error(code="bad-message", text=text))]

    def _hear_hello(self, arrival: MessageArrived, hello: Hello) -> list[Instruction]:
        """HELLO passes, if it is of somebody who may come this way."""
        state = self.state
        error = None
        if hello.role in AT_HOME:
            text = f"{hello.role} {hello.id} wants to join through a relay: let it dial the home broker itself"
            error = Error(code="denied", text=text)
        holder = state.sessions.find(hello.role, hello.id, hello.incarnation)
        error = error or state.doors.hello_error(arrival.key, hello, holder)
        if error is not None:
            said = log("warning", "client.refused", role=hello.role, id=hello.id, code=error.code, text=error.text)
            return [*reply(arrival, error), said]
        key_name = state.doors.visitor(arrival.key, hello).key_name
        if holder is None and state.sessions.is_full(key_name):
            text = f"{state.settings.sessions_max} sessions are open (sessions_max)"
            return [*reply(arrival, RetryAfter(seconds=state.settings.retry_seconds, reason=text))]
        return self._pass_on(arrival, key_name)

    def _pass_on(self, arrival: MessageArrived, key_name: str) -> list[Instruction]:
        message = self.state.passing.pass_on(arrival, key_name, self.state.now)
        if message is None:
            text = "too many questions wait at this relay for the home broker"
            return [*reply(arrival, RetryAfter(seconds=self.state.settings.retry_seconds, reason=text))]
        return [SendUp(0, Channel.CONTROL, message)]

    # ------------------------------------------------------------------------------------------------------- from home

    def _hear_home(self, said: HomeSaid) -> list[Instruction]:
        state, message = self.state, said.message
        orders = beating.heard(state, self.beats) if said.link == 0 else []
        if said.channel is Channel.CONTROL and message.request >= PASSED_REQUESTS_FROM:
            return [*orders, *self._pass_back(said)]
        if isinstance(message, Chunk):
            state.links.note_chunk(said.payload)
        answered = state.links.clients[said.link].handle(message, state.now, said.payload)
        sent, news = state.links.split(said.link, answered)
        return [*orders, *sent, *self._take_all(said.link, news)]

    def _pass_back(self, said: HomeSaid) -> list[Instruction]:
        """An answer to something that was passed on goes to who asked."""
        state, message = self.state, said.message
        passed = state.passing.answered(message.request)
        if passed is None:
            return []
        asked, answer = passed.asked, message
        orders: list[Instruction] = []
        if isinstance(message, Welcome) and isinstance(asked, Hello):
            orders = self._learn(passed, asked, message)
            chunks = {"chunk_bytes": state.settings.chunk_bytes, "credit_chunks": state.settings.credit_chunks}
            answer = message.changed(limits=message.limits.changed(**chunks))
        if isinstance(message, Done) and isinstance(asked, Leave):
            session = state.sessions.get(asked.session)
            if session is not None and not session.has_left:
                session.has_left = True
                orders = [log("info", "client.left", role=session.role, id=session.id)]
        return [Send(passed.channel, passed.connection, answer.addressed(request=passed.request)), *orders]

    def _learn(self, passed: Passed, hello: Hello, welcome: Welcome) -> list[Instruction]:
        """The home broker opened a session: what is said in it is understood here from now on."""
        state = self.state
        hello = hello.changed(id=hello.id or welcome.learner)
        earlier = state.sessions.find(hello.role, hello.id, hello.incarnation)
        if earlier is not None:
            state.drop_session(earlier.token)
        who = state.doors.visitor(passed.key, hello)
        session = state.sessions.adopt(
            welcome.new_session, hello, passed.connection, state.now, key_name=who.key_name, public=passed.key
        )
        older = state.abandon(state.uploads.drop_older(session.owner, session.incarnation))
        return [*older, *([joined_log(session)] if earlier is None else [])]

    def _take_all(self, link: int, news: list[News]) -> list[Instruction]:
        return [order for one in news for order in self._take(link, one)]

    def _take(self, link: int, news: News) -> list[Instruction]:
        state = self.state
        match news:
            case Hinted(hint):
                return [Publish(hint)] if link == 0 else []
            case Welcomed(welcome):
                state.outbox.note_home(welcome.broker_incarnation)
                said = log("info", "link.joined", link=link, broker_incarnation=welcome.broker_incarnation)
                return [said, *forwarding.forward(state), *fetching.fetch_next(state)]
            case Answered(ask) if isinstance(ask, RelayBeat):
                return beating.beat_answered(state, self.beats, news)
            case Answered():
                return forwarding.home_answered(state, news)
            case Fetched():
                return fetching.take_fetched(state, news)
            case FetchFailed():
                return fetching.take_fetch_failed(state, news)
            case Refused(code, text):
                return [End(code, text)]

    # --------------------------------------------------------------------------------------------------- from the disk

    def _hear_disk(self, event: RelayDiskEvent) -> list[Instruction]:
        state = self.state
        match event:
            case ChunkWritten(transfer):
                return [] if transfer >= FETCHED_FROM else offering.chunk_written(state, event)
            case UploadDurable(transfer) if transfer >= FETCHED_FROM:
                want = state.wanted.written(transfer)
                return [] if want is None else fetching.blob_cached(state, want)
            case UploadDurable():
                return offering.upload_durable(state, event)
            case UploadFailed(transfer) if transfer >= FETCHED_FROM:
                want = state.wanted.written(transfer)
                return [] if want is None else fetching.blob_not_cached(state, want, event)
            case UploadFailed():
                return offering.upload_failed(state, event)
            case ChunkRead():
                return fetching.chunk_read(state, event)
            case ReadFailed():
                return fetching.read_failed(state, event)
            case OfferKept():
                return offering.offer_kept(state, event)
            case OfferNotKept():
                return offering.offer_not_kept(state, event)
            case BlobMapped():
                return forwarding.blob_mapped(state, event)
            case BlobUnmappable():
                return forwarding.blob_unmappable(state, event)
        assert_never(event)

    # ------------------------------------------------------------------------------------------------------ time passes

    def _tick(self, event: Tick) -> list[Instruction]:
        state = self.state
        settings, now = state.settings, state.now
        state.disk_free_bytes = state.uploads.disk_free_bytes = event.disk_free_bytes
        orders: list[Instruction] = []
        for link, client in enumerate(state.links.clients):
            sent, news = state.links.split(link, client.tick(now))
            orders += [*sent, *self._take_all(link, news)]
        orders += beating.beat(state, self.beats)
        state.passing.forget_old(now)
        state.offers.forget(now)
        for session in state.sessions.forget_idle(now - settings.session_idle_seconds):
            state.drop_session(session.token)
        state.downloads.drop_idle(now - settings.upload_idle_seconds)
        orders += state.abandon(state.uploads.drop_idle(now - settings.upload_idle_seconds))
        orders += [*state.downloads.serve(), *forwarding.forward(state), *fetching.fetch_next(state)]
        return [*orders, *self._relieve()]

    def _relieve(self) -> list[Instruction]:
        """Keeps the disk from filling up with what can be had again, and says when the outbox has room again."""
        state = self.state
        missing = state.settings.disk_free_bytes_min - state.disk_free_bytes
        orders: list[Instruction] = [*state.make_room()]
        if missing > 0:
            orders += state.delete(state.cache.shrink(state.is_pinned, missing))
        if state.is_full and state.outbox.waiting_bytes < RELIEVED * state.outbox.bytes_max:
            state.is_full = False
            orders.append(log("info", "outbox.relieved", bytes=state.outbox.waiting_bytes))
        return orders
