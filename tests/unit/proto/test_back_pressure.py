"""What waits in the sockets of a broker is bounded, for a peer that floods it and for one that never reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from isles.proto.messages import Channel
from isles.proto.transport import zmq_transport
from isles.proto.transport.zmq_transport import BULK_RECEIVE_HIGH_WATER, BULK_SEND_HIGH_WATER_MIN, ZmqBroker

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
    monkeypatch.setattr(zmq_transport, "ARRIVAL_BYTES_MAX", 3 * CHUNK)
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
    most = zmq_transport.BULK_SEND_BYTES_MAX // CHUNK
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
