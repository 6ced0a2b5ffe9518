"""What is at the other end of a port: a broker's socket, something else, or nobody. Plain TCP, so that every kind of
failure has its own name; ZeroMQ dials for ever and says nothing.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal

from isles.proto.messages import Channel
from isles.proto.transport.address import Address

PortState = Literal["zeromq", "refused", "unanswered", "unreachable", "silent", "foreign"]

SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
"""How every peer of ZMTP 3 begins, and how nothing else does."""
GREETING_BYTES: Final = 64
"""Signature, two bytes of version, twenty of the mechanism's name, one for its side, zeros."""
OPENING: Final = SIGNATURE + b"\x03\x00"
"""As much of a greeting as makes the other end send all of its own; at another mechanism's name it would hang up."""
MECHANISM: Final = slice(12, 32)
ADDRESSES_MAX: Final = 8
"""Of one name that are dialled: no broker has more."""
SHOWN_BYTES: Final = 24
"""Of what a stranger says, for a person to recognise it."""


@dataclass(frozen=True, slots=True)
class PortSeen:
    """One port at one address."""

    channel: Channel
    address: str
    port: int
    state: PortState
    seconds: float = 0.0
    """Until the connection stood."""
    mechanism: str = ""
    """NULL or CURVE, of a ZeroMQ socket."""
    text: str = ""
    """What the system or the other end said."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a host's name stands for."""

    addresses: tuple[str, ...]
    fault: str = ""
    """Why there are none."""


def resolve(host: str, timeout_seconds: float) -> Resolved:
    """The IP addresses of a host, each once, in the system's order. Waits at most so long; never raises."""
    found: list[Resolved] = []

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            found.append(Resolved((), getattr(error, "strerror", None) or str(error)))
        else:
            found.append(Resolved(tuple(dict.fromkeys(str(info[4][0]) for info in infos))[:ADDRESSES_MAX]))

    # The system's resolver cannot be interrupted: a thread that nobody waits for may take as long as it likes.
    thread = threading.Thread(target=ask, name="resolver", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return found[0] if found else Resolved((), f"no answer within {timeout_seconds:g} s")


def look_at_ports(address: Address, hosts: Iterable[str], timeout_seconds: float) -> list[PortSeen]:
    """All three ports of a broker at each of its IP addresses, at the same time, in order. Never raises."""
    wanted = [(channel, host, int(address.of(channel).rpartition(":")[2])) for host in hosts for channel in Channel]
    if not wanted:
        return []
    with ThreadPoolExecutor(max_workers=len(wanted), thread_name_prefix="doctor") as threads:
        return list(threads.map(lambda one: look_at_port(one[0], one[1], one[2], timeout_seconds), wanted))


def look_at_port(channel: Channel, host: str, port: int, timeout_seconds: float) -> PortSeen:
    """One port: connects, and compares how it begins with how ZeroMQ does. Waits at most twice the time given."""

    def seen(state: PortState, seconds: float = 0.0, *, mechanism: str = "", text: str = "") -> PortSeen:
        return PortSeen(channel, host, port, state, seconds, mechanism, text)

    begun = time.monotonic()
    try:
        connection = socket.create_connection((host, port), timeout=timeout_seconds)
    except ConnectionRefusedError:
        return seen("refused")
    except TimeoutError:
        return seen("unanswered", text=f"no answer within {timeout_seconds:g} s")
    except OSError as error:
        return seen("unreachable", text=error.strerror or str(error))
    seconds = time.monotonic() - begun
    with connection:
        said = _exchange_greetings(connection, timeout_seconds)
    if said[:1] == SIGNATURE[:1] and said[9:10] == SIGNATURE[9:10] and len(said) == GREETING_BYTES:
        return seen("zeromq", seconds, mechanism=said[MECHANISM].rstrip(b"\0").decode("ascii", errors="replace"))
    if SIGNATURE.startswith(said[:1]) and (not said or len(said) == len(SIGNATURE)):
        return seen("silent", seconds, text="it takes the connection and says nothing more")
    return seen("foreign", seconds, text=f"it begins with {said[:SHOWN_BYTES].decode('latin-1')!r}")


def _exchange_greetings(connection: socket.socket, timeout_seconds: float) -> bytes:
    """As many bytes of the other end's greeting as come in time; what fails is as good as silence."""
    said = b""
    deadline = time.monotonic() + timeout_seconds
    try:
        connection.sendall(OPENING)
        while len(said) < GREETING_BYTES and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            piece = connection.recv(GREETING_BYTES - len(said))
            if not piece:
                break
            said += piece
            if said[:1] != SIGNATURE[:1] and len(said) >= SHOWN_BYTES:
                break
    except OSError:
        pass
    return said
