"""The least that moving bytes secretly costs: two sockets of libzmq in two processes, with CURVE and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Final, Self

import zmq

HIGH_WATER: Final = 32
"""Chunks that wait at either end, as at a broker."""
ANSWER_MILLISECONDS: Final = 300_000
STOP_SECONDS: Final = 10.0


class CurvePipe:
    """The sending end; `with` starts and ends the process at the other one."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes

    def __enter__(self) -> Self:
        public, secret = zmq.curve_keypair()
        self._child = subprocess.Popen(
            [sys.executable, "-P", __file__, secret.decode()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        endpoint = self._child.stdout.readline().strip()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _open(self._context, zmq.DEALER)
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_serverkey = public
        self._socket.connect(endpoint)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)
        self._context.term()
        self._child.terminate()
        self._child.wait(STOP_SECONDS)
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()

    def move(self, payload: bytearray) -> None:
        """Returns when the other process has all of it."""
        view = memoryview(payload)
        for start in range(0, len(view), self._chunk_bytes):
            header = str(len(view)).encode()
            self._socket.send_multipart([header, view[start : start + self._chunk_bytes]], copy=False)
        if self._socket.recv() != b"all":
            raise SystemExit("the other end of the pipe is out of step")


def _open(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.linger = 0
    socket.set_hwm(HIGH_WATER)
    socket.setsockopt(zmq.RCVTIMEO, ANSWER_MILLISECONDS)
    socket.setsockopt(zmq.SNDTIMEO, ANSWER_MILLISECONDS)
    return socket


def receive(secret: str) -> None:
    """The other process: says so when it has a payload, until whoever started it has ended."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = _open(context, zmq.ROUTER)
    socket.setsockopt(zmq.RCVTIMEO, -1)
    socket.curve_secretkey = secret.encode()
    socket.curve_server = True
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    print(f"tcp://127.0.0.1:{port}", flush=True)
    num_received = 0
    while True:
        sender, header, payload = socket.recv_multipart(copy=False)
        num_received += len(payload)
        if num_received == int(header.bytes):
            num_received = 0
            socket.send_multipart([sender.bytes, b"all"])


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    receive(sys.argv[1])
