"""What the kernel knows of this process and of its connections; on other systems than Linux it is asked nothing.

libzmq owns the descriptors. They are looked at through copies, so that nothing here acts on one that has become
another's: a copy stays what it was.
"""

from __future__ import annotations

import contextlib
import os
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
def _copy(descriptor: int) -> Iterator[socket.socket]:
    duplicate = os.dup(descriptor)
    try:
        # Which family is said saves asking for it, and changes nothing.
        copy = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    with copy:
        yield copy


def count(descriptor: int) -> Counts | None:
    """The counters of a connection; None if the descriptor is none (any more)."""
    try:
        with _copy(descriptor) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
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
    with contextlib.suppress(OSError), _copy(descriptor) as copy:
        if copy.getsockname()[1] == port:
            copy.shutdown(socket.SHUT_RDWR)


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
