"""The processes of one cycle, each with its own memory: who starts the run, who contributes, who applies.

initialise    writes the run's record and version 0, generated fragment by fragment
contributors  K synthetic learners: delta from a seed, encode, OFFER, upload, until the versions are out
learner       a real `Learner` that never trains: joins, applies every version, compares its digests at the end
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.scale.crowd import Crowd, Member, expect
from benchmarks.scale.synthetic import ASK_SECONDS, block_shapes, contribution, delta, make_manifest, start_run
from isles.proto.agreement import SyncSettings
from isles.proto.ids import ContributionId
from isles.proto.messages import Accepted, AskHistory, Contribution, History, Leave, Offer

LOOK_SECONDS: Final = 1.0
"""Between two looks at whether a version is out."""
STEP_SECONDS: Final = 0.02
"""Length of an inner step of the learner that does not train."""
ANSWER_SECONDS: Final = 30.0
CHECKED_FRAGMENTS: Final = 3


def initialise(arguments: argparse.Namespace) -> dict[str, float]:
    """Writes version 0 of every fragment and the run's record."""
    begun = time.monotonic()
    crowd = Crowd(arguments.broker, 1)
    crowd.join(ASK_SECONDS)
    manifest = make_manifest(arguments.size, arguments.fragments)
    start_run(crowd, manifest, arguments.seed, arguments.contributions)
    crowd.ask(crowd.members[0], Leave(), ASK_SECONDS)
    crowd.close()
    return {"seconds": time.monotonic() - begun}


class Contributors:
    """K learners that hand in one contribution to each fragment, the next one being made while one is sent."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._manifest = make_manifest(arguments.size, arguments.fragments)
        self._codec = SyncSettings().codec_up
        self._values = np.empty(max(fragment.num_values for fragment in self._manifest.fragments), np.float32)
        self.seconds = {"generate": 0.0, "encode": 0.0, "send": 0.0}
        self.payload_bytes = 0
        self.accepted_unix = 0.0

    def run(self) -> dict[str, Any]:
        arguments = self._arguments
        crowd = Crowd(arguments.broker, arguments.contributions)
        crowd.join(ASK_SECONDS)
        first_unix = 0.0
        jobs = [
            (fragment, number) for fragment in range(arguments.fragments) for number in range(arguments.contributions)
        ]
        with ThreadPoolExecutor(max_workers=1) as maker:
            made = maker.submit(self._make, crowd.members, *jobs[0])
            for job, following in zip(jobs, [*jobs[1:], None], strict=True):
                while not made.done():
                    _drain(crowd)
                books, payload = made.result()
                first_unix = first_unix or time.time()
                if following is not None:
                    made = maker.submit(self._make, crowd.members, *following)
                self._send(crowd, crowd.members[job[1]], books, payload)
        self.accepted_unix = time.time()
        update_bytes = self._wait_for_versions(crowd)
        for member in crowd.members:
            crowd.ask(member, Leave(), ASK_SECONDS)
        crowd.close()
        figures = {"payload_bytes": self.payload_bytes, "update_bytes": update_bytes}
        return {"seconds": self.seconds, "first_unix": first_unix, "accepted_unix": self.accepted_unix, **figures}

    def _make(self, members: list[Member], fragment: int, number: int) -> tuple[Contribution, bytes]:
        begun = time.monotonic()
        member = members[number]
        values = self._values[: self._manifest.fragments[fragment].num_values]
        delta(self._arguments.seed, number, fragment, 0, values)
        drawn = time.monotonic()
        name = ContributionId(member.name, fragment, member.incarnation, fragment)
        books, payload = contribution(name, 0, values, self._manifest.slices(fragment), self._codec)
        self.seconds["generate"] += drawn - begun
        self.seconds["encode"] += time.monotonic() - drawn
        return books, payload

    def _send(self, crowd: Crowd, member: Member, books: Contribution, payload: bytes) -> None:
        begun = time.monotonic()
        reply = crowd.ask(member, Offer(contribution=books), self._arguments.timeout_seconds, payload)
        expect(reply, Accepted)
        self.seconds["send"] += time.monotonic() - begun
        self.payload_bytes += len(payload)

    def _wait_for_versions(self, crowd: Crowd) -> int:
        """Until every fragment has its version, and its checkpoint is durable; the bytes of all updates."""
        deadline = time.monotonic() + self._arguments.timeout_seconds
        asker, updates = crowd.members[0], dict.fromkeys(range(self._arguments.fragments), 0)
        for fragment in updates:
            while True:
                reply = crowd.ask(asker, AskHistory(fragment=fragment, first=1, num_max=1), ASK_SECONDS)
                if isinstance(reply, History) and reply.versions and reply.versions[0].parameters is not None:
                    info = reply.versions[0]
                    updates[fragment] = 0 if info.update is None else info.update.size_bytes
                    break
                if time.monotonic() >= deadline:
                    raise SystemExit(f"fragment {fragment} had no checkpointed version in time: see the outer's log")
                until = time.monotonic() + LOOK_SECONDS
                while time.monotonic() < until:
                    _drain(crowd)
        return sum(updates.values())


def _drain(crowd: Crowd) -> None:
    for _ in crowd.turn(0.1):
        pass


# --------------------------------------------------------------------------------------------------- the real learner


def follow(arguments: argparse.Namespace) -> dict[str, Any]:
    """Joins, applies one version of each fragment, and compares what it holds with what the store says."""
    import torch
    from torch import nn

    from isles.proto.logs import make_logger
    from isles.workers.learner import Learner

    torch.set_num_threads(1)
    model = nn.Module()
    blocks: dict[str, nn.Module] = {}
    for name, shape in block_shapes(arguments.size, arguments.fragments).items():
        _, number, leaf = name.split(".")
        blocks.setdefault(number, nn.Module()).register_parameter(leaf, nn.Parameter(torch.empty(shape)))
    model.blocks = nn.ModuleDict(blocks)
    log = make_logger("worker", "real", file=Path(arguments.folder) / "learner.jsonl", level="debug")
    learner = Learner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        broker=arguments.broker,
        learner="real",
        join_timeout_seconds=arguments.timeout_seconds,
        log=log,
    )
    begun = time.monotonic()
    learner.start()
    joined = time.monotonic() - begun
    (Path(arguments.folder) / "joined").touch()
    deadline = time.monotonic() + arguments.timeout_seconds
    while min(learner.versions.values()) < 1:
        if time.monotonic() >= deadline:
            raise SystemExit(f"the learner holds {learner.versions} after {arguments.timeout_seconds:g} s")
        learner.step(tokens=0)
        time.sleep(STEP_SECONDS)
    applied_unix, blocked = time.time(), learner.seconds_blocked
    checks = _compare(learner, arguments)
    learner.close()
    return {"join_seconds": joined, "applied_unix": applied_unix, "blocked_seconds": blocked, **checks}


def _compare(learner: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """The learner's anchors must have the digests of the store; under rebase its parameters may round differently."""
    import torch

    from isles.proto.messages import AskStatus, Status
    from isles.proto.route import Route
    from isles.workers.parameters import parameters_digest
    from isles.workers.record import connect

    connection = connect(Route(arguments.broker), "operator", "scale")
    try:
        status = connection.ask_and_wait(AskStatus(), ANSWER_SECONDS, address=arguments.broker)
    finally:
        connection.close()
    if not isinstance(status, Status):
        raise SystemExit(f"the broker answered {type(status).__name__} to a question for its status")
    heads = {info.fragment: info for info in status.fragments}
    performer = learner._running.performer
    fragments = sorted({0, arguments.fragments // 2, arguments.fragments - 1})[:CHECKED_FRAGMENTS]
    difference = 0.0
    for fragment in fragments:
        anchor = performer.held[fragment].values
        if parameters_digest(anchor) != heads[fragment].parameters_sha256:
            raise SystemExit(
                f"fragment {fragment}: the learner's values are not those of version {heads[fragment].version}"
            )
        live = performer._flat.gather(fragment)
        difference = max(difference, float(torch.max(torch.abs(live - anchor))))
    return {"checked": fragments, "difference": difference}
