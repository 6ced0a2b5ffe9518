"""The relay process: one thread that owns the sockets of the region, one for each link to the home broker, some that
work on the disk.

arrivals of both sides and finished disk work  ->  events  ->  Relay  ->  instructions
"""

from __future__ import annotations

import queue
import secrets
import threading
import traceback
from collections.abc import Sequence
from typing import Final

from isles.brokers.arrivals import OWN_FAULTS, read_arrival
from isles.brokers.losses import Losses
from isles.brokers.relay.folder import RelayFolder
from isles.brokers.relay.relay import Relay
from isles.brokers.relay.vocabulary import (
    End,
    Event,
    HomeSaid,
    Instruction,
    KeepKeys,
    LinkDenied,
    Recheck,
    RelayDiskEvent,
    RelayDiskOrder,
    SendUp,
)
from isles.brokers.settings import BrokerSettings
from isles.brokers.store.disk import OrderThreads
from isles.brokers.vocabulary import Log, MessageArrived, Publish, Send, Tick
from isles.proto.clock import Clock, SystemClock
from isles.proto.errors import ConfigError, MessageError, refusal_error
from isles.proto.key_files import read_client_key
from isles.proto.keys import BrokerKey, ClientKey
from isles.proto.logs import Logger
from isles.proto.messages import pack, unpack
from isles.proto.timeouts import check_times, times_of
from isles.proto.transport.address import Address
from isles.proto.transport.interface import Arrival, BrokerTransport, ClientTransport

INCARNATION_BYTES: Final = 16
"""Random bytes that name one start of this process, as everybody's."""
LINK_POLL_SECONDS: Final = 1.0
"""Longest wait of a link's thread: whoever has something for it wakes it."""
LINK_STOP_SECONDS: Final = 10.0
"""Longest wait for a link's thread at the end; it only moves messages."""


class LinkThread:
    """A thread that moves messages between one client's sockets and two queues, and nothing else."""

    def __init__(self, number: int, transport: ClientTransport) -> None:
        """Starts nothing; from `start` on, the transport is the thread's."""
        self._number = number
        self._transport = transport
        # Bounded by what the core has under way: questions that were passed on, and chunks by their credit.
        self._orders: queue.SimpleQueue[SendUp] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._should_stop = threading.Event()
        self._wake_owner = threading.Event().set
        self._thread = threading.Thread(target=self._work, name=f"link-{number}", daemon=True)
        self._fault: BaseException | None = None
        self._has_orders = False

    def start(self, broker: BrokerTransport) -> None:
        """Starts the thread; `broker` is woken when something has come."""
        self._wake_owner = broker.wake
        self._thread.start()

    def submit(self, order: SendUp) -> None:
        """Takes a message; it goes with the next `flush`."""
        self._orders.put(order)
        self._has_orders = True

    def flush(self) -> None:
        """Wakes the thread, if there is something to send."""
        if self._has_orders:
            self._has_orders = False
            self._transport.wake()

    def take(self) -> list[Event]:
        """What has come since the last call. Raises what ended the thread."""
        if self._fault is not None:
            raise self._fault
        events: list[Event] = []
        while True:
            try:
                arrival = self._arrivals.get_nowait()
            except queue.Empty:
                break
            try:
                message = unpack(arrival.header)
            except MessageError:
                continue  # a home broker that is newer than we are may say things that we need not know
            events.append(HomeSaid(self._number, arrival.channel, message, arrival.payload))
        if self._transport.denial is not None:
            events.append(LinkDenied(self._transport.denial))
        return events

    def _work(self) -> None:
        try:
            while not self._should_stop.is_set():
                self._turn()
        except Exception as error:  # noqa: BLE001 - told to the thread that owns this one
            self._fault = error
            self._wake_owner()

    def _turn(self) -> None:
        arrivals = self._transport.poll(LINK_POLL_SECONDS)
        for arrival in arrivals:
            self._arrivals.put(arrival)
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                break
            self._transport.send(order.channel, pack(order.message), order.payload)
        if arrivals or self._transport.denial is not None:
            self._wake_owner()

    def close(self) -> None:
        """Ends the thread, and closes its sockets; idempotent."""
        self._should_stop.set()
        if self._thread.ident is not None:
            self._transport.wake()
            self._thread.join(LINK_STOP_SECONDS)
        if not self._thread.is_alive():
            self._transport.close()


class RelayProcess:
    """One relay: performs what the core orders, and tells it what happens."""

    def __init__(
        self,
        settings: BrokerSettings,
        core: Relay,
        transport: BrokerTransport,
        links: Sequence[LinkThread],
        folder: RelayFolder,
        clock: Clock,
        logger: Logger,
    ) -> None:
        """Starts nothing."""
        self._settings = settings
        self._core = core
        self._transport = transport
        self._links = links
        self._folder = folder
        self._clock = clock
        self._logger = logger
        self._disk: OrderThreads[RelayDiskOrder, RelayDiskEvent] = OrderThreads(
            folder.perform, settings.num_disk_threads, transport.wake
        )
        self._say = {"debug": logger.debug, "info": logger.info, "warning": logger.warning, "error": logger.error}
        self._ticked_at: float | None = None
        self._losses = Losses(logger, clock.now())

    def run(self, stop: threading.Event) -> None:
        """Works until `stop` is set. Raises StoreError if the disk failed, RefusedError if the home broker refuses."""
        self._disk.start()
        for link in self._links:
            link.start(self._transport)
        try:
            self._perform_all(self._core.start())
            while not stop.is_set():
                self.work(self._settings.tick_seconds)
        finally:
            for link in self._links:
                link.close()
            self._disk.close()
            self._folder.close()

    def work(self, timeout_seconds: float) -> None:
        """One turn: takes what has come, decides, and does it."""
        for event in self._gather(timeout_seconds):
            self._perform_all(self._decide(event))
        for link in self._links:
            link.flush()

    def _gather(self, timeout_seconds: float) -> list[Event]:
        events: list[Event] = [read_arrival(arrival) for arrival in self._transport.poll(timeout_seconds)]
        for link in self._links:
            events += link.take()
        events += self._disk.completed()
        now = self._clock.now()
        if self._ticked_at is None or now - self._ticked_at >= self._settings.tick_seconds:
            self._ticked_at = now
            self._losses.tell(self._transport.take_cuts(), now)
            events.append(Tick(self._folder.blobs.free_bytes()))
        return events

    def _decide(self, event: Event) -> list[Instruction]:
        try:
            return self._core.handle(event, self._clock.now())
        except OWN_FAULTS as error:
            about = type(event.message if isinstance(event, MessageArrived | HomeSaid) else event).__name__
            text = f"{type(error).__name__}: {error}"
            where = traceback.format_exc(limit=-3)
            self._logger.error("message.refused", code="internal", text=text, about=about, traceback=where)
            return []

    def _perform_all(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._perform(instruction)

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Send(channel, connection, message, payload):
                if not self._transport.send(channel, connection, pack(message), payload):
                    self._losses.drop()
            case SendUp(link):
                self._links[link].submit(instruction)
            case Publish(hint):
                self._transport.publish(pack(hint))
            case Log(level, event, fields):
                self._say[level](event, **fields)
            case KeepKeys(alive):
                self._folder.keep_keys(alive)
            case Recheck():
                self._transport.recheck()
            case End(code, text):
                home = self._settings.upstream
                raise refusal_error(code)(f"the home broker at {home} refused this relay ({code}): {text}")
            case _:
                self._disk.submit(instruction)


def serve(settings: BrokerSettings, *, logger: Logger, should_stop: threading.Event) -> int:
    """Runs a relay until `should_stop`; the exit code.

    Raises ConfigError if it cannot listen or its key cannot be used, StoreLockedError if another process has its
    folder, StoreError if the disk fails, RefusedError if the home broker will not have it.
    """
    from isles.proto.transport.tcp import allow_descriptors
    from isles.proto.transport.zmq_transport import ZmqBroker, ZmqClient

    assert settings.upstream is not None
    allow_descriptors()
    check_times(times_of("broker", settings), logger)
    key = None if settings.upstream_key is None else read_client_key(settings.upstream_key)
    folder = RelayFolder.open(settings.store)
    links: list[LinkThread] = []
    transport: ZmqBroker | None = None
    clock = SystemClock()
    try:
        core = _make_core(settings, key, folder, clock, logger)
        transport = ZmqBroker(
            settings.host,
            settings.ports,
            None if key is None else BrokerKey(public=key.public, secret=key.secret),
            lambda public: _lets_in(core, public),
            settings.chunk_bytes,
            settings.waiting_bytes_max,
            settings.connections_per_key_max,
        )
        upstream = Address.parse(settings.upstream)
        links += [LinkThread(link, ZmqClient(upstream, key)) for link in range(settings.upstream_connections)]
        folder.write_address(str(transport.address))
        logger.info(
            "relay.started",
            address=str(transport.address),
            upstream=settings.upstream,
            store=str(settings.store),
            region=settings.region,
        )
        RelayProcess(settings, core, transport, links, folder, clock, logger).run(should_stop)
    finally:
        for link in links:
            link.close()
        if transport is not None:
            transport.close()
        folder.close()
    return 0


def _make_core(
    settings: BrokerSettings, key: ClientKey | None, folder: RelayFolder, clock: Clock, logger: Logger
) -> Relay:
    if key is not None and key.role != "relay":
        raise ConfigError(
            f"the key {settings.upstream_key} is of {key.role} {key.name}, and a relay needs one with the role relay: "
            "make it with `isles keys new` where the home broker's keys are"
        )
    name = settings.id or (key.name if key is not None else f"relay-{settings.region}")
    kept = folder.find()
    for damaged in folder.damaged:
        text = f"{damaged} could not be read and was deleted; whoever sent what was in it has it still"
        logger.error("offer.damaged", file=damaged, text=text)
    incarnation = secrets.token_hex(INCARNATION_BYTES)
    return Relay(name, settings, incarnation, clock.now(), has_keys=key is not None, kept=kept)


def _lets_in(core: Relay, public: str) -> bool:
    allowed = core.state.doors.allowed
    return allowed is not None and allowed.find(public) is not None
