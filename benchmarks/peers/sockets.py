"""Bytes on the sockets of a process and its children, as the kernel counts them for each TCP connection.

The counters are those of `ss -ti`: payload bytes of TCP, without headers, acknowledgements and repetitions. What a
learner's processes say to one another does not count, even if they say it over TCP. Only Linux has this.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SOCK_DIAG: Final = 4
SOCK_DIAG_BY_FAMILY: Final = 20
DUMP_REQUEST: Final = 0x301
"""NLM_F_REQUEST | NLM_F_DUMP."""
DONE: Final = 3
ERROR: Final = 2
INFO: Final = 2
"""INET_DIAG_INFO: the attribute that holds `struct tcp_info`."""
ALL_STATES: Final = 0xFFFFFFFF
REPLY_BYTES: Final = 1 << 16
BYTES_RECEIVED_AT: Final = 128
BYTES_SENT_AT: Final = 200
"""Offsets in `struct tcp_info`; bytes that were sent again follow those that were sent. Linux 4.19 and newer."""
INODE_AT: Final = 68
HEAD_BYTES: Final = 72
"""Of `struct inet_diag_msg`, whose last field is the inode."""


class SocketBytes:
    """Counts the TCP payload of a process tree; to be looked at often, since what is closed is no longer counted."""

    def __init__(self, root: int = 0) -> None:
        """`root` is the process at the top of the tree; 0 = this one. Raises OSError where the kernel tells nothing."""
        self._root = root or os.getpid()
        self._seen: dict[int, tuple[int, int]] = {}
        self.look()

    @property
    def sent(self) -> int:
        """Bytes sent so far, at the last look."""
        return sum(sent for sent, _ in self._seen.values())

    @property
    def received(self) -> int:
        """Bytes received so far, at the last look."""
        return sum(received for _, received in self._seen.values())

    def look(self) -> None:
        inodes = {inode for pid in tree(self._root) for inode in _inodes(pid)}
        connections = [entry for family in (socket.AF_INET, socket.AF_INET6) for entry in _connections(family)]
        own = [entry for entry in connections if entry[0] in inodes]
        ends = {ports for _, ports, _ in own}
        for inode, (port, other), counted in own:
            if (other, port) not in ends:
                self._seen[inode] = counted


def tree(root: int) -> set[int]:
    """The process and all its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, size = {root}, 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found


def _inodes(pid: int) -> Iterator[int]:
    try:
        names = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(name)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield int(target[8:-1])


def _connections(family: int) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Each TCP connection of this network namespace: inode, own and other port, bytes sent and received."""
    body = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (INFO - 1), ALL_STATES)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as kernel:
        kernel.sendto(struct.pack("=IHHII", 16 + len(body), SOCK_DIAG_BY_FAMILY, DUMP_REQUEST, 0, 0) + body, (0, 0))
        while True:
            reply = kernel.recv(REPLY_BYTES)
            at = 0
            while at + 16 <= len(reply):
                length, kind = struct.unpack_from("=IH", reply, at)
                if kind == DONE:
                    return
                if kind == ERROR:
                    raise OSError(-struct.unpack_from("=i", reply, at + 16)[0], "the kernel lists no TCP sockets")
                yield from _connection(reply[at + 16 : at + length])
                at += (length + 3) & ~3


def _connection(message: bytes) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
    own, other = struct.unpack_from("!HH", message, 4)
    (inode,) = struct.unpack_from("=I", message, INODE_AT)
    at = HEAD_BYTES
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == INFO and length >= 4 + BYTES_SENT_AT + 16:
            (received,) = struct.unpack_from("=Q", message, at + 4 + BYTES_RECEIVED_AT)
            sent, again = struct.unpack_from("=QQ", message, at + 4 + BYTES_SENT_AT)
            yield inode, (own, other), (sent - again, received)
        at += max(4, (length + 3) & ~3)
