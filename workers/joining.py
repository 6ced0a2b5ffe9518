"""How a learner gets into a run: it finds the run's record, or writes it from its own weights if there is none.

The first INIT wins, atomically. Whoever comes second, or late, adopts the record and takes the versions of the store:
a fresh learner's weights never become an existing run's parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from isles.proto.agreement import Budget, RunRecord, Scalar, SyncSettings
from isles.proto.client import Answered, Hinted, Welcomed, as_error
from isles.proto.clock import Clock
from isles.proto.codec.torch_codec import encode
from isles.proto.connection import Connection, News, raise_if_refused
from isles.proto.errors import FencedError, ManifestError, ManifestMismatchError, RefusedError, UnreachableError
from isles.proto.logs import Logger
from isles.proto.manifest import Manifest
from isles.proto.messages import BlobRef, Hello, Init, Initialised, Message, Stored, Upload, VersionInfo, Welcome
from isles.proto.timeouts import check_times, times_of, times_told
from isles.workers.checkpoint import origin_of
from isles.workers.courier import LOST_SECONDS
from isles.workers.description import ModelTensors
from isles.workers.flat import FlatModel
from isles.workers.parameters import PARAMETERS_CODEC, parameters_digest
from isles.workers.record import LEAVE_SECONDS, SLICE_SECONDS

LOOK_AGAIN_SECONDS: Final = 2.0
"""Wait between two looks at a run that nobody has started yet, should the hint about it be lost."""

FIRST_VERSION_TRIES_MAX: Final = 3
"""How often INIT is tried when the broker answers it with an error, before its text is passed on."""


@dataclass(frozen=True)
class NewRun:
    """What the record of a run that does not exist yet would say."""

    run: str
    sync: SyncSettings
    budget: Budget
    seed: int = 1
    task: str = ""
    task_settings: dict[str, Scalar] = field(default_factory=dict)
    corpus_sha256: str = ""

    def record(self, manifest: Manifest) -> RunRecord:
        """The record, for a model with this manifest."""
        return RunRecord(
            run=self.run,
            seed=self.seed,
            sync=self.sync,
            budget=self.budget,
            manifest_digest=manifest.digest,
            manifest=manifest.to_text(),
            task=self.task,
            task_settings=self.task_settings,
            corpus_sha256=self.corpus_sha256,
        )


@dataclass(frozen=True)
class Joined:
    """The state of the run when this learner's incarnation became the current one."""

    welcome: Welcome
    record: RunRecord
    manifest: Manifest


class Joiner:
    """Talks to the broker until there is a run and this learner is in it; blocks, with a deadline."""

    def __init__(
        self,
        connection: Connection,
        tensors: ModelTensors,
        *,
        new_run: NewRun | None,
        address: str,
        timeout_seconds: float,
        should_stop: Callable[[], bool],
        clock: Clock,
        log: Logger,
        resumes: str = "",
    ) -> None:
        """`resumes` is the run that this learner's checkpoint is of: it starts no other, and not that one anew."""
        self._connection = connection
        self._tensors = tensors
        self._new_run = new_run
        self._address = address
        self._timeout_seconds = timeout_seconds
        self._deadline = clock.now() + timeout_seconds
        self._should_stop = should_stop
        self._clock = clock
        self._log = log
        self._resumes = resumes
        self._session = ""

    def join(self) -> Joined:
        """Returns when this learner is in the run.

        Raises UnreachableError if that takes longer than the time given or is stopped, RefusedError or FencedError if
        the broker will not have it, ManifestError or ManifestMismatchError if the model is not the run's.
        """
        try:
            return self._join()
        except FencedError:
            raise
        except (RefusedError, ManifestError, ManifestMismatchError, UnreachableError):
            # It may have been let in, while there was no run or before the models were compared: no round is to wait.
            if self._session:
                self._connection.leave_and_wait(self._session, LEAVE_SECONDS)
            raise

    def _join(self) -> Joined:
        welcome, fault = self._say_hello(), ""
        if welcome.run_record is None and self._resumes:
            raise RefusedError(
                f"the broker at {self._address} has no run, but this learner's checkpoint is of the run "
                f"{self._resumes}: its store was emptied, or this is another broker; give it the old store, or start "
                "all workers anew with empty checkpoint folders"
            )
        for _ in range(FIRST_VERSION_TRIES_MAX):
            if welcome.run_record is None and self._new_run is not None:
                fault = offer_first_version(self._tensors, self._new_run, self._ask)
                welcome = self._say_hello()
                if welcome.run_record is None and fault:
                    self._log.warning("message.refused", code="init", text=fault)
        while welcome.run_record is None:
            if self._new_run is not None:
                raise RefusedError(f"the broker at {self._address} took no INIT of this worker, {fault}")
            self._wait_for_start()
            welcome = self._say_hello()
        return self._check(welcome, welcome.run_record)

    def _check(self, welcome: Welcome, record: RunRecord) -> Joined:
        manifest = Manifest.build(self._tensors.specs, self._tensors.aliases, record.sync.num_fragments)
        if manifest.digest != record.manifest_digest:
            difference = manifest.difference(Manifest.from_text(record.manifest))
            raise ManifestMismatchError(
                f"this worker's model is not that of the run {record.run}: {difference}; build it from the run's task "
                "and task settings"
            )
        # From now on a broker that serves another run, or another model, refuses this process.
        hello = self._connection.client.hello
        update = {"run": record.run, "manifest_digest": manifest.digest}
        self._connection.client.hello = hello.model_copy(update=update)
        self._log.info("broker.joined", address=self._address, run=record.run)
        return Joined(welcome, record, manifest)

    # --------------------------------------------------------------------------------------------------------- waiting

    def _say_hello(self) -> Welcome:
        self._connection.start()
        news = self._wait_until(lambda news: isinstance(news, Welcomed), "answered")
        assert isinstance(news, Welcomed)
        self._session = news.welcome.new_session
        return news.welcome

    def _ask(self, message: Message, payload: bytes | None = None) -> Message:
        self._connection.ask(message, payload)
        news = self._wait_until(
            lambda news: isinstance(news, Answered) and news.ask is message, "took this worker's model"
        )
        assert isinstance(news, Answered)
        return news.reply

    def _wait_for_start(self) -> None:
        """Waits for another worker's INIT, or long enough that looking again is due."""
        until = min(self._deadline, self._clock.now() + LOOK_AGAIN_SECONDS)
        self._poll_until(lambda news: isinstance(news, Hinted) and news.hint.kind == "initialised", until)
        if self._clock.now() >= self._deadline:
            raise UnreachableError(
                f"the broker at {self._address} has no run yet, and no worker with run settings has started one within "
                f"{self._timeout_seconds:g} s: give this worker a budget and sync settings, or start one that has them"
            )

    def _wait_until(self, is_wanted: Callable[[News], bool], what: str) -> News:
        news = self._poll_until(is_wanted, self._deadline)
        if news is None:
            raise UnreachableError(
                f"no broker {what} at {self._address} within {self._timeout_seconds:g} s: is it running there, and do "
                "the three ports reach it from this machine?"
            )
        return news

    def _poll_until(self, is_wanted: Callable[[News], bool], until: float) -> News | None:
        while (left := until - self._clock.now()) > 0:
            if self._should_stop():
                raise UnreachableError(f"stopped before the broker at {self._address} had let this worker in")
            for news in self._connection.poll(min(left, SLICE_SECONDS)):
                raise_if_refused(news, self._address)
                if is_wanted(news):
                    return news
        return None


def with_origin(hello: Hello, checkpoint_dir: Path | None) -> Hello:
    """The same HELLO with the run and the store that a learner's checkpoint is of: another store refuses it.

    A checkpoint of a run with another name than the one that is wanted is left for its reader to complain of.
    """
    run, store = ("", "") if checkpoint_dir is None else origin_of(checkpoint_dir)
    return hello.model_copy(update={"run": run, "store": store}) if store and hello.run in ("", run) else hello


def check_learner_times(joined: Joined, own: Mapping[str, float], log: Logger) -> None:
    """Compares this learner's times, in seconds, with those of the run and of its broker, and says them once.

    Raises ConfigError if they cannot work.
    """
    told = times_of("sync", joined.record.sync) | times_told(joined.welcome.limits)
    named = {f"worker.{name}_seconds": seconds for name, seconds in own.items()}
    check_times(told | named | {"learner.lost_seconds": LOST_SECONDS}, log)


def offer_first_version(tensors: ModelTensors, new_run: NewRun, ask: Callable[..., Message]) -> str:
    """Offers a model as version 0 of a new run; returns what the broker objected to, or an empty text.

    `ask(message, payload)` waits for the answer. Raises ManifestError for a model that cannot be split as asked.
    """
    manifest = Manifest.build(tensors.specs, tensors.aliases, new_run.sync.num_fragments)
    flat = FlatModel(tensors, manifest)
    versions = []
    for fragment in range(len(manifest.fragments)):
        values = flat.gather(fragment)
        payload = encode(PARAMETERS_CODEC, values)
        blob = BlobRef(digest=hashlib.sha256(payload).hexdigest(), size_bytes=len(payload))
        reply = ask(Upload(blob=blob), payload)
        if not isinstance(reply, Stored):
            return _text_of(reply)
        digest = parameters_digest(values)
        versions.append(VersionInfo(fragment=fragment, version=0, parameters_sha256=digest, parameters=blob))
    reply = ask(Init(run_record=new_run.record(manifest), versions=tuple(versions)))
    return "" if isinstance(reply, Initialised) else _text_of(reply)


def _text_of(reply: Message) -> str:
    error = as_error(reply)
    return f"{error.code}: {error.text}"
