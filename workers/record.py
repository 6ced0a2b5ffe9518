"""What a process takes over from the run record, and what it must bring itself.

The first worker of a run writes the record; everybody later reads it and builds the same model from it. Two things
are never taken from another machine: the name of a task, which would be code to run, and the path of the corpus. The
corpus is compared by its digest instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeVar

from isles.proto.agreement import RunRecord, Scalar
from isles.proto.client import Answered, Welcomed
from isles.proto.clock import SystemClock
from isles.proto.config import Config
from isles.proto.connection import Connection, raise_if_refused
from isles.proto.errors import ConfigError, RefusedError, unanswered
from isles.proto.messages import COUNT_MAX, AskStatus, Hello, Role, Status, Welcome
from isles.proto.route import Route
from isles.workers.claim import Identity, new_incarnation
from isles.workers.task import Task, load_task

SLICE_SECONDS: Final = 0.25
"""Longest single wait for the broker: a request to stop is seen within it, and a question without session repeated."""

LEAVE_SECONDS: Final = 2.0
"""For the answer to a LEAVE; without it the broker finds out when the lease has run out."""

_Answer = TypeVar("_Answer", Status, Welcome)

LOCAL_TASK_SETTINGS: Final = frozenset({"corpus"})
"""Settings of a task that say where something is on this machine."""

RECORD_KEYS: Final[Mapping[str, str]] = {
    "run.id": "run",
    "run.seed": "seed",
    "run.task": "task",
    "run.tokens": "budget.tokens",
    "run.rounds": "budget.rounds",
}
"""Settings of a process -> where they stand in the run record; `sync` has its own name there."""


def statements(config: Config) -> dict[str, Scalar]:
    """What somebody set on purpose that the run must agree with, by the keys of the run record; for HELLO."""
    stated: dict[str, Scalar] = {}
    for section in ("run", "sync", "task"):
        for name, value in config.stated_in(section).items() if section in config.sections else ():
            if section == "task" and name not in LOCAL_TASK_SETTINGS:
                stated[f"task_settings.{name}"] = value
            elif section != "task":
                key = f"{section}.{name}"
                stated[RECORD_KEYS.get(key, key)] = value
    return stated


def shared_task_settings(task: Task) -> dict[str, Scalar]:
    """A task's settings as the run record carries them: without what is true on one machine alone."""
    return {key: value for key, value in task.settings.items() if key not in LOCAL_TASK_SETTINGS}


def make_task(record: RunRecord | None, name: str, own: Mapping[str, Scalar]) -> Task:
    """The run's task, or without a record the task of this process's own settings.

    `name` and `own` are this process's settings. Raises ConfigError if the run trains another task or on another
    corpus, and what `load_task` raises.
    """
    if record is None:
        return load_task(name, own)
    if record.task != name:
        raise ConfigError(
            f"the run {record.run} trains the task {record.task!r}, this process was told {name!r}: a task is code, so "
            f"it is never taken from the network; start this process with --task {record.task!r} if you trust it"
        )
    shared = {key: value for key, value in record.task_settings.items() if key not in LOCAL_TASK_SETTINGS}
    task = load_task(name, shared | {key: own[key] for key in LOCAL_TASK_SETTINGS & own.keys()})
    if record.corpus_sha256 and task.corpus_sha256 != record.corpus_sha256:
        raise ConfigError(
            f"the corpus here has the digest {task.corpus_sha256[:12] or 'of nothing'}, that of the run {record.run} "
            f"{record.corpus_sha256[:12]}: give every process the same files (task.corpus); the default, Python's own "
            "library, is the same only under the same Python version"
        )
    return task


def connect(route: Route, role: Role, name: str, *, stated: Mapping[str, Scalar] | None = None) -> Connection:
    """A new incarnation's connection over ZeroMQ; nothing is said yet.

    Raises ConfigError for an address or a key file that cannot be used.
    """
    return route.connect(Hello(role=role, id=name, incarnation=new_incarnation(), stated=dict(stated or {})))


def read_run_record(
    route: Route,
    timeout_seconds: float,
    *,
    stated: Mapping[str, Scalar] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunRecord | None:
    """The record of the run at the broker; None if no worker has started it yet.

    Needs no session, so that no learner is disturbed. Raises UnreachableError after the timeout or a request to stop,
    RefusedError if something in `stated` is not the run's, or the broker will not have this process.
    """
    address, connection = route.address, connect(route, "operator", "reader")
    question = AskStatus(reports_after=COUNT_MAX, wants_record=True)

    def ask(timeout_seconds: float) -> Status | None:
        connection.client.forget(lambda _: True)
        connection.ask(question)
        for news in connection.poll(timeout_seconds):
            raise_if_refused(news, address)
            if isinstance(news, Answered) and isinstance(news.reply, Status):
                return news.reply
        return None

    try:
        status = _repeat_until(ask, timeout_seconds, address=address, should_stop=should_stop)
    finally:
        connection.close()
    record = status.run_record
    if record is not None and (difference := record.first_difference(dict(stated or {}))):
        raise RefusedError(f"the run {record.run} at {address} is another one: {difference}")
    return record


@contextmanager
def asking_for_id(
    route: Route,
    region: str,
    timeout_seconds: float,
    *,
    incarnation: str,
    should_stop: Callable[[], bool],
) -> Iterator[Identity]:
    """An id that the broker gives to a worker with a key, and what takes it again. Raises as `say_hello`.

    Whoever asks again as the same incarnation is given the same one, until the context is left without an error: that
    says that the id is kept.
    """
    address, connection = route.address, connect(route, "worker", "")
    hello = connection.client.hello
    connection.client.hello = hello.model_copy(update={"region": region, "incarnation": incarnation})
    try:
        welcome = say_hello(connection, timeout_seconds, address=address, should_stop=should_stop)
        if not welcome.rejoin:
            raise RefusedError(f"the broker at {address} gives no ids: name this learner with --id")
        yield Identity(id=welcome.learner, rejoin=welcome.rejoin)
        # This was another incarnation than the one that is to train: no round has to wait for it.
        connection.leave_and_wait(welcome.new_session, LEAVE_SECONDS)
    finally:
        connection.close()


def say_hello(
    connection: Connection, timeout_seconds: float, *, address: str, should_stop: Callable[[], bool]
) -> Welcome:
    """Waits until the broker has let us in, but not once a stop was requested.

    Raises UnreachableError after the timeout or a request to stop, RefusedError or FencedError if it will not.
    """
    connection.start()

    def listen(timeout_seconds: float) -> Welcome | None:
        for news in connection.poll(timeout_seconds):
            raise_if_refused(news, address)
            if isinstance(news, Welcomed):
                return news.welcome
        return None

    return _repeat_until(listen, timeout_seconds, address=address, should_stop=should_stop)


def _repeat_until(
    try_once: Callable[[float], _Answer | None],
    timeout_seconds: float,
    *,
    address: str,
    should_stop: Callable[[], bool],
) -> _Answer:
    """The first answer of a broker. Raises UnreachableError after the timeout or a request to stop."""
    clock = SystemClock()
    deadline = clock.now() + timeout_seconds
    while (left := deadline - clock.now()) > 0 and not should_stop():
        answer = try_once(min(left, SLICE_SECONDS))
        if answer is not None:
            return answer
    raise unanswered(address, timeout_seconds)
