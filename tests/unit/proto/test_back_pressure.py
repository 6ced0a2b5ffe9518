"""What waits in the sockets of a broker is bounded, for a peer that floods it and for one that never reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from isles.proto.messages import Channel
from isles.proto.transport import bounds, exchange, tcp
from isles.proto.transport.bounds import BULK_RECEIVE_HIGH_WATER, BULK_SEND_BYTES_MAX, BULK_SEND_HIGH_WATER_MIN
from isles.proto.transport.zmq_transport import ZmqBroker

CHUNK = 1 << 20
IN_THE_NETWORK_MAX = 64 * CHUNK
"""Far above what the kernel buffers of one connection on loopback hold."""
QUIET_MILLISECONDS = 500
"""Without any progress for so long, nothing more is taken."""


@pytest.fixture
def broker() -> Iterator[ZmqBroker]:
    made = ZmqBroker("127.0.0.1", chunk_bytes=CHUNK)
    yield made
    made.close()


@pytest.fixture
def peer(broker: ZmqBroker) -> Iterator[zmq.Socket[bytes]]:
    """A raw connection to the bulk socket, which keeps nothing for itself."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 1
    socket.connect(broker.address.bulk)
    yield socket
    socket.close(linger=0)
    context.term()


def flood(peer: zmq.Socket[bytes], most: int) -> int:
    """Sends chunks until no more is taken; how many were."""
    for number in range(most):
        if not peer.poll(QUIET_MILLISECONDS, zmq.POLLOUT):
            return number
        peer.send_multipart([b"header", bytes(CHUNK)])
    return most


def test_a_peer_that_floods_bulk_is_held_back_in_the_network(broker: ZmqBroker, peer: zmq.Socket[bytes]) -> None:
    most = 2 * BULK_RECEIVE_HIGH_WATER + IN_THE_NETWORK_MAX // CHUNK
    assert flood(peer, 10 * most) < most


def test_one_turn_takes_in_a_bounded_number_of_bytes(
    broker: ZmqBroker, peer: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "ARRIVAL_BYTES_MAX", 3 * CHUNK)
    num_sent = flood(peer, 12)
    counts: list[int] = []
    while sum(counts) < num_sent:
        arrivals = broker.poll(10.0)
        assert arrivals, "everything that was sent arrives, turn by turn"
        counts.append(len(arrivals))
    assert max(counts) <= 3


def test_a_peer_that_never_reads_is_sent_no_more_than_the_bound(broker: ZmqBroker, peer: zmq.Socket[bytes]) -> None:
    peer.send_multipart([b"header", b"x"])
    [arrival] = broker.poll(10.0)
    most = BULK_SEND_BYTES_MAX // CHUNK
    chunk = bytes(CHUNK)
    num_taken = 0
    while num_taken < 3 * most and broker.send(Channel.BULK, arrival.connection, b"header", chunk):
        num_taken += 1
    assert num_taken <= most + IN_THE_NETWORK_MAX // CHUNK


def test_long_chunks_may_wait_too_one_for_each_fetch() -> None:
    broker = ZmqBroker("127.0.0.1", chunk_bytes=16 << 20)
    try:
        assert broker._channels[Channel.BULK].sndhwm == BULK_SEND_HIGH_WATER_MIN
    finally:
        broker.close()


def test_a_broker_beats_no_heart_of_its_own(broker: ZmqBroker) -> None:
    """libzmq ends a process at its next heartbeat over a connection that was reset while its queue was full: whoever is
    let in could do that to a broker at will. The clients' own heartbeats have a time to live, and so end on silence."""
    assert {socket.heartbeat_ivl for socket in broker._channels.values()} == {0}


def test_what_peers_do_not_take_is_bounded_for_all_of_them_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATTEND_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(exchange, name, 0.0)
    monkeypatch.setattr(exchange, "SEEN_SHARE", -1.0)
    broker = ZmqBroker("127.0.0.1", chunk_bytes=CHUNK, waiting_bytes_max=40 * CHUNK)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peers = []
    try:
        for number in range(3):
            peers.append(context.socket(zmq.DEALER))
            peers[-1].linger, peers[-1].sndhwm, peers[-1].rcvhwm, peers[-1].reconnect_ivl = 0, 1, 1, -1
            peers[-1].connect(broker.address.bulk)
            peers[-1].send_multipart([b"header", b"%d" % number])
            [arrival] = broker.poll(10.0)
            num_given = 0
            while broker.send(Channel.BULK, arrival.connection, b"header", bytes(CHUNK)) and num_given < 60:
                num_given += 1
        cuts: dict[str, int] = {}
        while not cuts:
            broker.poll(0.05)
            cuts = broker.take_cuts()
        assert set(cuts) == {"overfull"}
        assert sum(line.waiting(0.0) for line in broker._exchange._backlog.lines.values()) <= 40 * CHUNK
    finally:
        for peer in peers:
            peer.close(linger=0)
        context.term()
        broker.close()


def test_what_was_read_and_given_is_what_the_kernel_has_counted(broker: ZmqBroker, peer: zmq.Socket[bytes]) -> None:
    """So nothing adds up over the days that somebody is connected."""
    for size in (0, 1, 200, 253, 254, 255, 256, 300, 70_000):
        peer.send_multipart([b"header", bytes(size)])
        [arrival] = broker.poll(10.0)
        assert broker.send(Channel.BULK, arrival.connection, b"header", bytes(size))
        peer.recv_multipart()
    [(place, line)] = broker._exchange._backlog.lines.items()
    counts = tcp.count(place.descriptor)
    assert counts is not None
    greeting = 64 + len(b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00")
    assert abs(counts.received - line.read - greeting) < 32
    assert abs(counts.sent - line.given - greeting) < 32
    while counts.acknowledged < counts.sent:
        broker.poll(0.01)
        counts = tcp.count(place.descriptor) or counts
