"""Workers as far as their ids: each claims one as `isles worker` does, says which, and holds it until it is killed.

    an order on standard input, one JSON object a line      what happens on standard output, likewise
    address, key, folder, point                             pid and started; pid, id and rejoin; pid and ended

One process has loaded everything and forks each worker. `point` names a moment at which a worker kills itself; empty
for one that lives.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from isles.proto.client import Client
from isles.proto.connection import Connection
from isles.proto.errors import IslesError
from isles.proto.messages import Welcome
from isles.proto.route import Route
from isles.proto.transport.zmq_transport import ZmqClient
from isles.workers import claim, record

WAIT_SECONDS = 60.0


def say(**what: object) -> None:
    os.write(1, (json.dumps({"pid": os.getpid()} | what) + "\n").encode())


def die(*_: object, **__: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def then_die(before: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
        if before(*arguments, **keywords):
            die()
        return False

    return run


def die_at(point: str) -> None:
    handle, replace, leave = Client.handle, Path.replace, Connection.leave_and_wait

    def die_of_welcome(client: Client, message: Any, *arguments: Any) -> Any:
        return die() if isinstance(message, Welcome) else handle(client, message, *arguments)

    def die_of_second(path: Path, target: Any) -> Any:
        return die() if b"rejoin" in path.read_bytes() else replace(path, target)

    def leave_first(*arguments: Any) -> Any:
        leave(*arguments)
        die()

    match point:
        case "before it has asked":
            record.say_hello = die
        case "when it has asked":
            ZmqClient.send = then_die(ZmqClient.send)  # type: ignore[method-assign]
        case "when it is answered":
            Client.handle = die_of_welcome  # type: ignore[assignment, method-assign]
        case "while it keeps the answer":
            Path.replace = die_of_second  # type: ignore[assignment, method-assign]
        case "when it has kept the answer":
            Connection.leave_and_wait = die  # type: ignore[method-assign]
        case "when it has confirmed the answer":
            Connection.leave_and_wait = leave_first  # type: ignore[assignment, method-assign]
        case _:
            assert not point, point


def work(address: str, key: str, folder: str, point: str) -> None:
    die_at(point)

    def ask(incarnation: str) -> AbstractContextManager[claim.Identity]:
        return record.asking_for_id(
            Route(address, Path(key)), "local", WAIT_SECONDS, incarnation=incarnation, should_stop=lambda: False
        )

    try:
        with claim.claim_given(Path(folder), ask) as claimed:
            say(id=claimed.name, rejoin=claimed.rejoin, folder=str(claimed.folder))
            signal.pause()
    except IslesError as error:
        say(error=str(error))


def reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            say(pid=found[0], ended=os.waitstatus_to_exitcode(found[1]))


def main() -> None:
    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            work(**order)
            os._exit(0)
        say(pid=child, started=True)


if __name__ == "__main__":
    main()
