"""CURVE and ZAP: how the sockets of a broker know who dials them, and how it is proved that they do.

libzmq lets everybody in if anything is missing: so every socket has a ZAP domain and enforces it, the handler lives in
the same loop as the sockets, and at start the broker dials itself as a stranger and must be refused.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

import zmq
import zmq.auth

from isles.proto.errors import ConfigError
from isles.proto.key_files import check_curve, generate_pair
from isles.proto.keys import BrokerKey, ClientKey, KeyPair
from isles.proto.messages import Channel
from isles.proto.transport.address import Address
from isles.proto.transport.dialling import Outcome

DOMAIN: Final = "isles"
"""ZAP domain of every socket; not empty, or libzmq asks nobody."""
ANSWERS_MAX: Final = 32
"""Handshakes answered before messages have their turn: strangers who knock do not keep those waiting who are inside."""
PROBE_SECONDS: Final = 5.0
"""For a broker to greet whoever dials it: one round trip, and some attempts."""
TRY_AGAIN_MILLISECONDS: Final = 20
"""Between two attempts of a probe or a stranger: whoever refuses them may hang up before they have read that."""
SELF_TEST_SECONDS: Final = 10.0
"""Longest self-test: six handshakes on this machine take some milliseconds."""

_WATCHED: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_OUTCOMES: Final = {
    int(zmq.EVENT_CONNECTED): Outcome.CONNECTED,
    int(zmq.EVENT_CONNECT_RETRIED): Outcome.RETRIED,
    int(zmq.EVENT_DISCONNECTED): Outcome.LOST,
    int(zmq.EVENT_HANDSHAKE_SUCCEEDED): Outcome.OPENED,
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): Outcome.CUT,
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): Outcome.CUT,
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): Outcome.REFUSED,
}


class Monitor:
    """What libzmq reports about the connections of one socket. Belongs to the socket's thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes]) -> None:
        endpoint = f"inproc://monitor-{secrets.token_hex(8)}"
        watched.monitor(endpoint, _WATCHED)
        self._watched = watched
        self.socket = context.socket(zmq.PAIR)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.RCVHWM, 0)  # a full one would stop libzmq's own thread
        self.socket.connect(endpoint)

    def outcomes(self) -> list[Outcome]:
        """What happened since the last call, in order."""
        found = []
        while int(self.socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN):
            event, value = struct.unpack("=Hi", self.socket.recv_multipart(zmq.DONTWAIT)[0])
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                found.append(Outcome.MISMATCHED)
            elif event in _OUTCOMES:
                found.append(_OUTCOMES[event])
        return found

    def close(self) -> None:
        """Ends the reports; before the socket itself is closed."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)


class Probe:
    """Asks who is at an endpoint, without a key. Belongs to one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, now: float) -> None:
        """Dials at once."""
        self._dialled = context.socket(zmq.DEALER)
        self._dialled.linger = 0
        self._dialled.setsockopt(zmq.IPV6, 1)
        self._dialled.setsockopt(zmq.RECONNECT_IVL, TRY_AGAIN_MILLISECONDS)
        self._monitor = Monitor(context, self._dialled)
        self._deadline = now + PROBE_SECONDS
        self._dialled.connect(endpoint)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Readable when `answer` may have one."""
        return self._monitor.socket

    def answer(self, now: float) -> bool | None:
        """True: a broker that has keys; False: something else, or nobody in time; None: not known yet."""
        for outcome in self._monitor.outcomes():
            # A cut says nothing: a broker that sees that we have no key may hang up before we have read its greeting.
            if outcome in (Outcome.MISMATCHED, Outcome.OPENED):
                return outcome is Outcome.MISMATCHED
        return False if now >= self._deadline else None

    def close(self) -> None:
        """Hangs up."""
        self._monitor.close()
        self._dialled.close(linger=0)


class Doors:
    """The broker's side: gives its sockets their key, and answers libzmq's question whether a client may come in."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], key: BrokerKey, is_allowed: Callable[[str], bool]
    ) -> None:
        """Answers from now on, whenever `answer` is called. Raises ConfigError for a pair that is none."""
        check_pair(key, "the broker's key")
        self._key = key
        self._is_allowed = is_allowed
        self._authenticator = zmq.auth.Authenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, credentials_provider=self)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Readable when somebody waits for an answer."""
        socket: zmq.Socket[bytes] = self._authenticator.zap_socket
        return socket

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Lets only those into a socket who are allowed; before it is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret.encode())
        socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def answer(self) -> None:
        """Answers some of those who wait."""
        for _ in range(ANSWERS_MAX):
            if not int(self.socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN):
                return
            _finish(self._authenticator.handle_zap_message(self.socket.recv_multipart(zmq.DONTWAIT)))

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of a public key (z85) may come in; called by the authenticator.

        It must never raise: the question would stay unanswered, and with it all later ones.
        """
        try:
            return self._is_allowed(key.decode("ascii"))
        except Exception:  # noqa: BLE001 - whatever goes wrong, the door stays shut
            return False

    def close(self) -> None:
        """Answers nobody any more: from now on, nobody comes in."""
        self._authenticator.stop()


def _finish(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine that waits for nothing: pyzmq's authenticator is one, with a plain function to ask."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise AssertionError("the authenticator waits for something, but nothing here lets it")


def show_key(socket: zmq.Socket[bytes], key: ClientKey | KeyPair, broker: str) -> None:
    """Makes a client's socket prove its key, and talk to nobody but the owner of `broker`; before it is connected."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, broker.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())


def check_pair(pair: KeyPair, what: str) -> None:
    """Raises ConfigError if the two halves do not belong together, or this libzmq has no CURVE."""
    check_curve()
    if zmq.curve_public(pair.secret.encode()).decode() != pair.public:
        raise ConfigError(
            f"{what} is damaged: its secret half does not belong to its public one; make a new one with `isles keys`"
        )


# ----------------------------------------------------------------------------------------------------------- self-test


def prove_closed(address: Address, broker: str, attend: Callable[[], None]) -> None:
    """Dials the three ports as a stranger, with a random key and with none; all six must be refused.

    `broker` is the broker's public key, `attend` lets the broker answer its handshakes. Raises ConfigError if anybody
    was let in, or not refused in time.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    strangers: dict[tuple[Channel, bool], tuple[zmq.Socket[bytes], Monitor]] = {}
    try:
        for channel in Channel:
            for has_key in (True, False):
                strangers[channel, has_key] = _dial_as_stranger(context, channel, address, broker if has_key else None)
        waiting = set(strangers)
        deadline = time.monotonic() + SELF_TEST_SECONDS
        poller = zmq.Poller()
        for _, monitor in strangers.values():
            poller.register(monitor.socket, zmq.POLLIN)
        while waiting:
            attend()
            poller.poll(10)
            for place in list(waiting):
                if _is_refused(strangers[place][1].outcomes(), place, address):
                    waiting.discard(place)
            if waiting and time.monotonic() > deadline:
                raise ConfigError(_silent_sentence(waiting, address))
    finally:
        for socket, monitor in strangers.values():
            monitor.close()
            socket.close(linger=0)
        context.term()


def _dial_as_stranger(
    context: zmq.Context[zmq.Socket[bytes]], channel: Channel, address: Address, broker: str | None
) -> tuple[zmq.Socket[bytes], Monitor]:
    socket = context.socket(zmq.SUB if channel is Channel.EVENTS else zmq.DEALER)
    socket.linger = 0
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, TRY_AGAIN_MILLISECONDS)
    if broker is not None:
        show_key(socket, generate_pair(), broker)
    monitor = Monitor(context, socket)
    socket.connect(address.of(channel))
    return socket, monitor


def _is_refused(outcomes: Iterable[Outcome], place: tuple[Channel, bool], address: Address) -> bool:
    channel, has_key = place
    for outcome in outcomes:
        if outcome is Outcome.OPENED:
            stranger = "an unknown key" if has_key else "a client without a key"
            raise ConfigError(
                f"this broker let {stranger} in at {address.of(channel)} when it tried its own doors, and it does not "
                "start with open ones: check whom its allow-list lets in, and that libzmq is the one of the pyzmq wheel"
            )
        if outcome is Outcome.REFUSED or (not has_key and outcome in (Outcome.MISMATCHED, Outcome.CUT)):
            return True
    return False


def _silent_sentence(waiting: Iterable[tuple[Channel, bool]], address: Address) -> str:
    ports = ", ".join(sorted({address.of(channel) for channel, _ in waiting}))
    return (
        f"this broker tried its own doors, and strangers were not refused at {ports} within {SELF_TEST_SECONDS:g} s: "
        "check that this machine reaches the address it listens on, then start it again"
    )
