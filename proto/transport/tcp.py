"""What the kernel knows of this process and of its connections; on other systems than Linux it is asked nothing.

libzmq owns the descriptors, and may close one and open another under its number at any moment. So they are borrowed for
one question each, and whoever hangs up makes sure before that it is a connection to the port that is meant. Copies
would be safer still, but there are none left when strangers hold all descriptors.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from isles.proto.transport.backlog import Counts

IS_LINUX: Final = sys.platform == "linux"
INFO_BYTES: Final = 216
"""Of Linux's `struct tcp_info`, up to the bytes that were sent again: since Linux 4.19."""
ACKNOWLEDGED_AT: Final = 120
SENT_AT: Final = 200
"""Where pairs of 64-bit counters stand: acknowledged and received; sent, and sent again."""
STATM: Final = Path("/proc/self/statm")
PAGE_BYTES: Final = resource.getpagesize()


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    # Which family is said saves asking for it, and changes nothing.
    borrowed = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def count(descriptor: int) -> Counts | None:
    """The counters of a connection; None if the descriptor is none (any more)."""
    try:
        with _borrowed(descriptor) as borrowed:
            info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    except OSError:
        return None
    if len(info) < INFO_BYTES:
        return None
    acknowledged, received = struct.unpack_from("=QQ", info, ACKNOWLEDGED_AT)
    sent, sent_again = struct.unpack_from("=QQ", info, SENT_AT)
    return Counts(received, sent - sent_again, acknowledged)


def hang_up(descriptor: int, port: int) -> None:
    """Ends a connection to a local port, whatever of it is under way; its owner finds that out as if the other had.

    Does nothing if the descriptor is no such connection (any more).
    """
    with contextlib.suppress(OSError), _borrowed(descriptor) as borrowed:
        if borrowed.getsockname()[1] == port:
            borrowed.shutdown(socket.SHUT_RDWR)


def resident_bytes() -> int:
    """Memory of this process; 0 where that is not known."""
    try:
        return int(STATM.read_bytes().split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def allow_descriptors() -> int:
    """Lets this process open as many descriptors as its hard limit permits; how many that are.

    Every connection is one, those of strangers too: a broker with the usual 1024 would have none left for its store.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
