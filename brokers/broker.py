"""The broker process: one thread that owns the sockets and the index, some that work on the disk.

arrivals and finished disk work  ->  events  ->  Router, in one transaction  ->  instructions, once it is durable
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Final

from isles.brokers.allow_list import AllowListFile
from isles.brokers.arrivals import OWN_FAULTS, read_arrival
from isles.brokers.losses import Losses
from isles.brokers.router import Router
from isles.brokers.settings import BrokerSettings
from isles.brokers.store.disk import Disk, DiskThreads
from isles.brokers.store.fullness import store_error
from isles.brokers.store.index import DamagedEntryError
from isles.brokers.store.store import Store
from isles.brokers.vocabulary import (
    AllowListChanged,
    Event,
    Instruction,
    Log,
    MessageArrived,
    Publish,
    Send,
    Tick,
)
from isles.proto.clock import Clock, SystemClock
from isles.proto.errors import ConfigError, IslesError
from isles.proto.key_files import read_broker_key
from isles.proto.keys import AllowList
from isles.proto.logs import Logger
from isles.proto.messages import Error, ErrorCode, pack
from isles.proto.proofs import Verifier, is_available
from isles.proto.timeouts import check_times, times_of
from isles.proto.transport.interface import BrokerTransport

TOKEN_BYTES: Final = 16
"""Of a session's name: nobody guesses 128 bits."""


class Broker:
    """One broker. It owns the store from `run` on; its transport stays its maker's."""

    def __init__(
        self,
        settings: BrokerSettings,
        transport: BrokerTransport,
        store: Store,
        clock: Clock,
        logger: Logger,
        disk: Disk | None = None,
        allow_list: AllowListFile | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        """Starts nothing. Without `disk`, threads of its own do the disk work; without `allow_list` it has no keys.

        With keys but no `verifier` it takes no relays.
        """
        self._settings = settings
        self._transport = transport
        self._store = store
        self._clock = clock
        self._logger = logger
        self._disk = disk or DiskThreads(store.blobs, settings.num_disk_threads, transport.wake)
        self._allow_list = allow_list
        self._ticked_at: float | None = None
        self._losses = Losses(logger, clock.now())
        self.incarnation = secrets.token_hex(TOKEN_BYTES)
        with self._store_faults():
            self.router = Router(
                store.index,
                settings,
                self.incarnation,
                lambda: secrets.token_hex(TOKEN_BYTES),
                clock.now(),
                clock.unix(),
                version("isles"),
                allow_list.allowed if allow_list is not None else None,
                None if verifier is None else verifier.verify,
            )

    def run(self, stop: threading.Event) -> None:
        """Works until `stop` is set. Raises StoreError if the disk or the index failed."""
        self.start()
        try:
            while not stop.is_set():
                self.work(self._settings.tick_seconds)
        finally:
            self.close()

    def start(self) -> None:
        """Clears away what an earlier process left half done."""
        num_blobs, num_bytes = self._store.sweep()
        if num_blobs:
            self._logger.info("store.swept", num_blobs=num_blobs, bytes=num_bytes)
        self._disk.start()

    def work(self, timeout_seconds: float) -> None:
        """One turn: takes what has come, decides in one transaction, and answers when that is durable."""
        events = self._gather(timeout_seconds)
        if not events:
            return
        with self._store_faults(), self._store.index.transaction():
            instructions = [instruction for event in events for instruction in self._decide(event)]
        for instruction in instructions:
            self._perform(instruction)

    def close(self) -> None:
        """Ends the disk work and gives the store back; what was not answered was not promised."""
        self._disk.close()
        try:
            with self._store_faults(), self._store.index.transaction():
                self.router.flush()
        finally:
            self._store.close()

    def _gather(self, timeout_seconds: float) -> list[Event]:
        arrivals = self._transport.poll(timeout_seconds)
        events: list[Event] = [read_arrival(arrival) for arrival in arrivals]
        events += self._disk.completed()
        now = self._clock.now()
        if self._ticked_at is None or now - self._ticked_at >= self._settings.tick_seconds:
            self._ticked_at = now
            self._losses.tell(self._transport.take_cuts(), now)
            events.append(Tick(self._store.blobs.free_bytes()))
            if self._allow_list is not None:
                events += self._look_at(self._allow_list, now)
        return events

    def _look_at(self, allow_list: AllowListFile, now: float) -> list[Event]:
        before = allow_list.allowed
        try:
            allowed = allow_list.look()
        except ConfigError as error:
            if allow_list.should_complain(now):
                text = f"{error}; until then those are let in whom it named before, and nobody else"
                self._logger.error("keys.unreadable", text=text)
            return []
        if allowed is None:
            return []
        self._logger.info("keys.changed", **_facts(allowed))
        if any(allowed.find(key.public) is None for key in before):
            self._transport.recheck()
        return [AllowListChanged(allowed)]

    def _decide(self, event: Event) -> list[Instruction]:
        try:
            with self._store.index.transaction():
                return self.router.handle(event, self._clock.now(), self._clock.unix())
        except DamagedEntryError as error:
            self._logger.error("message.refused", code="damaged", text=str(error), about=_subject(event))
            return _answer(event, "damaged", str(error))
        except (*OWN_FAULTS, sqlite3.IntegrityError) as error:
            text = f"{type(error).__name__}: {error}"
            where = traceback.format_exc(limit=-3)
            self._logger.error("message.refused", code="internal", text=text, about=_subject(event), traceback=where)
            return _answer(event, "internal", f"this broker made a mistake with {_subject(event)}; its log says more")

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Send(channel, connection, message, payload):
                if not self._transport.send(channel, connection, pack(message), payload):
                    self._losses.drop()
            case Publish(hint):
                self._transport.publish(pack(hint))
            case Log(level, event, fields):
                getattr(self._logger, level)(event, **fields)
            case _:
                self._disk.submit(instruction)

    @contextmanager
    def _store_faults(self) -> Iterator[None]:
        """Turns a failure of the index into the sentence that ends this process.

        Even where the disk is merely full: what the router remembers of a transaction that was not written, such as the
        epoch of a lease, holds no longer, and only the next start is sure of what does.
        """
        try:
            yield
        except sqlite3.Error as error:
            text = (
                f"the index of the store failed ({error}): nothing of it was answered; check the disk, then start "
                "this broker again"
            )
            raise store_error(text, error, self._settings.store) from error


def _subject(event: Event) -> str:
    """What an event is about."""
    return type(event.message if isinstance(event, MessageArrived) else event).__name__


def _answer(event: Event, code: ErrorCode, text: str) -> list[Instruction]:
    """An error for whoever asked, if anybody did."""
    if not isinstance(event, MessageArrived):
        return []
    return [Send(event.channel, event.connection, Error(request=event.message.request, code=code, text=text))]


def _facts(allowed: AllowList) -> dict[str, int]:
    return {"num_keys": len(allowed.keys), "num_names": len({key.name for key in allowed})}


def serve(settings: BrokerSettings, *, logger: Logger, should_stop: threading.Event) -> int:
    """Runs a broker until `should_stop`, a relay if it has an upstream; the exit code.

    Raises ConfigError if it cannot listen or its keys cannot be used, StoreLockedError if another one has the store,
    StoreError if the disk fails.
    """
    if settings.upstream is not None:
        from isles.brokers.relay.process import serve as serve_relay

        return serve_relay(settings, logger=logger, should_stop=should_stop)
    from isles.proto.transport.tcp import allow_descriptors
    from isles.proto.transport.zmq_transport import ZmqBroker

    allow_descriptors()
    check_times(times_of("broker", settings), logger)
    allow_list = None if settings.keys is None else AllowListFile(settings.keys)
    keys = None if settings.keys is None else read_broker_key(settings.keys)
    verifier = None if keys is None or not is_available() else Verifier(keys)
    lets_in = allow_list.lets_in if allow_list is not None else _nobody
    store = Store.open(settings.store)
    try:
        transport = ZmqBroker(
            settings.host,
            settings.ports,
            keys,
            lets_in,
            settings.chunk_bytes,
            settings.waiting_bytes_max,
            settings.connections_per_key_max,
        )
    except IslesError:
        store.close()
        raise
    try:
        broker = Broker(settings, transport, store, SystemClock(), logger, allow_list=allow_list, verifier=verifier)
        _write_address(settings.store / "address", str(transport.address))
        logger.info(
            "broker.started",
            address=str(transport.address),
            store=str(settings.store),
            incarnation=broker.incarnation,
        )
        if allow_list is not None:
            logger.info("keys.changed", **_facts(allow_list.allowed))
        broker.run(should_stop)
    finally:
        transport.close()
        store.close()
    return 0


def _nobody(_public: str) -> bool:
    return False


def _write_address(path: Path, address: str) -> None:
    """Says where this broker listens; whole or not at all, since others read it. Raises StoreError."""
    partial = path.with_suffix(".tmp")
    try:
        partial.write_text(address + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        text = f"{path} cannot be written ({error}): mend the store folder, then start this broker again"
        raise store_error(text, error, path.parent) from error
