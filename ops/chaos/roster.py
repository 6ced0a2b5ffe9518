"""Whom faults can happen to in one run: known before anything happens, so that a mistyped name is no fault left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from isles.ops.chaos.campaign import Process
from isles.ops.chaos.plan import NETWORK_KINDS, Fault, Plan, Role
from isles.ops.settings import UpSettings
from isles.proto.errors import ConfigError

NAMES_SHOWN: Final = 20
"""In one sentence: a larger fleet is counted."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process that a run may have."""

    role: Role
    region: str = ""


@dataclass(frozen=True)
class Roster:
    """All processes of a run by their names, whether they are alive at the moment or not."""

    members: Mapping[str, Member]
    place: str
    """What has them, in words: `the run of runs/demo`."""

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers: only between them and their broker there is a network."""
        return tuple(name for name, member in self.members.items() if member.role == "worker")

    @property
    def regions(self) -> tuple[str, ...]:
        """Those of the workers, in alphabetical order."""
        return tuple(sorted({self.members[name].region for name in self.workers} - {""}))

    @property
    def roles(self) -> frozenset[Role]:
        """Those that any process has."""
        return frozenset(member.role for member in self.members.values())

    def check(self, plan: Plan, source: str) -> None:
        """Raises ConfigError for the first fault of a plan that could happen to nobody here; says who is here."""
        for number, fault in enumerate(plan.fault, 1):
            if wrong := self._fault(fault):
                raise ConfigError(f"{source}: fault {number} ({fault.sentence}): {wrong}")

    def check_names(self, names: Iterable[str], source: str) -> None:
        """Raises ConfigError for the first name that no process here has."""
        for name in names:
            if name not in self.members:
                raise ConfigError(f"{source}: {self._no_process(name)}")

    def _fault(self, fault: Fault) -> str:
        """What is wrong with whom it names; empty = nothing."""
        if fault.process and fault.process not in self.members:
            return self._no_process(fault.process)
        if fault.role is not None and fault.role not in self.roles:
            return f"there is no {fault.role} in {self.place}: it has {_listed(self.members)}"
        if fault.region and fault.region not in self.regions:
            has = f"it has {_listed(self.regions)}" if self.regions else "its workers have none"
            return f"there is no region {fault.region} in {self.place}: {has}"
        if fault.process and fault.kind in NETWORK_KINDS and fault.process not in self.workers:
            return (
                f"{fault.kind} takes place between a worker and its broker, and {fault.process} is no worker of "
                f"{self.place}: those are {_listed(self.workers)}"
            )
        return ""

    def _no_process(self, name: str) -> str:
        return f"there is no process {name} in {self.place}: it has {_listed(self.members)}"


def roster_of(settings: UpSettings) -> Roster:
    """That of a run on one machine."""
    members = {"broker": Member("broker"), **{name: Member("outer") for name in settings.outer_names}}
    if settings.has_evaluator:
        members["evaluator"] = Member("evaluator")
    members |= {name: Member("worker", region) for name, region in settings.worker_ids.items()}
    return Roster(members, f"the run of {settings.run_dir}")


def roster_of_project(project: str, processes: Iterable[Process]) -> Roster:
    """That of a compose project: its containers, also those that stand still."""
    members = {one.name: Member(one.role, one.region) for one in processes}
    return Roster(members, f"the compose project {project}")


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = len(found) - NAMES_SHOWN
    return ", ".join(found[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "") or "nobody"
