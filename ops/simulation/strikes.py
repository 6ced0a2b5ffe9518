"""What each kind of fault does to the simulated world."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from isles.ops.simulation.broker_actor import Crash
from isles.ops.simulation.faults import Blow, Weather
from isles.ops.simulation.network import REGIONS, Direction, Episode
from isles.ops.simulation.processes import Process

if TYPE_CHECKING:
    from isles.ops.simulation.fault_world import FaultWorld

EPISODE_SECONDS: Final = (1.0, 8.0)
"""How long bad weather lasts, at least and at most: up to a few leases."""
FREEZE_SECONDS: Final = (1.0, 10.0)
DEATH_SECONDS: Final = (0.0, 5.0)
"""From the end of a process to the start of the next one."""
SLOW_DISK_SECONDS: Final = 0.3
"""That each operation of a slow disk takes."""
CRASHES: Final[tuple[Crash | None, ...]] = (None, "before commit", "before answers")
TORN_CHANCE: Final = 0.7
"""That a power failure comes in the middle of a disk's work, if there is any."""
REGION_CHANCE: Final = 0.4
"""That bad weather is that of a region, not of one process."""
BLOBS_ROTTEN: Final = (1, 3)
"""How many blobs one case of bit rot damages, at least and at most."""


def worsen(world: FaultWorld, kind: Weather) -> None:
    """Bad weather begins."""
    chance = world.chance
    names = [place.name for place in world.places] + ["outer-a", "outer-b"]
    place = chance.choice(REGIONS) if chance.random() < REGION_CHANCE else chance.choice(names)
    ways: tuple[Direction, ...] = ("up", "down")
    direction = chance.choice(ways) if kind == "one-way partition" else None
    episode = Episode(kind, place, world.timeline.now + chance.uniform(*EPISODE_SECONDS), direction)
    world.network.begin(episode)
    world.timeline.say(f"FAULT {episode}")


def kill_learner(world: FaultWorld) -> None:
    """A learner dies; it starts again soon, with a checkpoint of any age or none."""
    learners = world.learners()
    if learners:
        process = world.chance.choice(learners)
        world.timeline.say(f"FAULT kill {process.name}")
        world.kill(process, world.timeline.now + world.chance.uniform(*DEATH_SECONDS))


def kill_outer(world: FaultWorld) -> None:
    """An outer dies; all it knows is lost."""
    outers = world.outers()
    if outers:
        process = world.chance.choice(outers)
        world.timeline.say(f"FAULT kill {process.name}")
        world.kill(process, world.timeline.now + world.chance.uniform(*DEATH_SECONDS))


def kill_broker(world: FaultWorld) -> None:
    """The broker dies between two events, within a transaction, or with its answers on its lips."""
    if world.machine.broker.is_up:
        crash = world.chance.choice(CRASHES)
        world.timeline.say(f"FAULT kill broker {crash or ''}")
        world.machine.kill(crash)


def fail_power(world: FaultWorld) -> None:
    """The broker's machine stops, often in the middle of what its disk does."""
    after = None
    if world.machine.broker.is_up and world.chance.random() < TORN_CHANCE:
        after = world.chance.randint(0, 6)
    world.timeline.say("FAULT power failure" + ("" if after is None else f" after {after} operations of the disk"))
    world.machine.fail_power(after)


def black_out(world: FaultWorld) -> None:
    """Everything stops at once."""
    world.timeline.say("FAULT blackout")
    everybody: list[Process[Any]] = [*world.learners(), *world.outers()]
    for process in everybody:
        world.kill(process, world.timeline.now + world.chance.uniform(*DEATH_SECONDS))
    world.machine.fail_power(None)


def freeze(world: FaultWorld) -> None:
    """A process stands still and goes on later as if nothing had been, perhaps long after its lease."""
    chance = world.chance
    until = world.timeline.now + chance.uniform(*FREEZE_SECONDS)
    candidates: list[Process[Any] | None] = [*world.learners(), *world.outers(), None]
    process = chance.choice(candidates)
    world.timeline.say(f"FAULT freeze {process.name if process else 'broker'} until {until:.1f}")
    if process is None:
        world.machine.freeze(until)
    else:
        world.freeze(process, until)


def leave_zombie(world: FaultWorld) -> None:
    """A process stands still, another one takes its place, and then it wakes."""
    chance = world.chance
    candidates: list[Process[Any]] = [*world.learners(), *world.outers()]
    if candidates:
        process = chance.choice(candidates)
        until = world.timeline.now + chance.uniform(*FREEZE_SECONDS)
        world.timeline.say(f"FAULT {process.name} becomes a zombie that wakes at {until:.1f}")
        world.freeze(process, until)
        process.is_zombie = True
        world.replace(process, world.timeline.now + chance.uniform(0.0, 3.0))


def slow_disk(world: FaultWorld) -> None:
    """The broker's disk takes its time."""
    until = world.timeline.now + world.chance.uniform(*EPISODE_SECONDS)
    world.timeline.say(f"FAULT slow disk until {until:.1f}")
    world.machine.slow_disk(SLOW_DISK_SECONDS * world.chance.random(), until)


def fill_disk(world: FaultWorld) -> None:
    """The broker's disk has no room."""
    until = world.timeline.now + world.chance.uniform(*EPISODE_SECONDS)
    world.timeline.say(f"FAULT full disk until {until:.1f}")
    world.machine.fill_disk(until)


def rot(world: FaultWorld) -> None:
    """Some blobs on the broker's disk are damaged while they lie there, whether a broker is up or not."""
    for _ in range(world.chance.randint(*BLOBS_ROTTEN)):
        found = world.machine.rot()
        if found:
            world.timeline.say(f"FAULT bit rot: {found}")


BLOWS: Final[dict[Blow, Callable[[FaultWorld], None]]] = {
    "kill learner": kill_learner,
    "kill outer": kill_outer,
    "kill broker": kill_broker,
    "power failure": fail_power,
    "blackout": black_out,
    "freeze": freeze,
    "zombie": leave_zombie,
    "slow disk": slow_disk,
    "full disk": fill_disk,
    "bit rot": rot,
}
