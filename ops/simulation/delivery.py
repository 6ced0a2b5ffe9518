"""Carries what processes and broker say to each other over the links of the simulated world."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from isles.brokers import vocabulary as broker
from isles.ops.simulation.broker_machine import BrokerMachine
from isles.ops.simulation.credit import CreditBook
from isles.ops.simulation.network import Direction, Network
from isles.ops.simulation.processes import Process
from isles.ops.simulation.timeline import Timeline
from isles.proto.client import Send
from isles.proto.messages import Channel, Chunk, Message


@dataclass
class Delivery:
    """All that is under way between the broker and everybody else."""

    timeline: Timeline
    network: Network
    machine: BrokerMachine
    credit: CreditBook
    processes: dict[bytes, Process[Any]] = field(default_factory=dict)
    """Connection -> who is at its other end."""
    num_deliveries: int = 0
    _num_connections: int = 0

    def draw_connection(self) -> bytes:
        """That of a new process."""
        self._num_connections += 1
        return b"c%d" % self._num_connections

    def flush(self, process: Process[Any]) -> None:
        """Puts on its way what a process has to say."""
        outbox = process.actor.outbox
        if outbox:
            for send in outbox:
                if isinstance(send.message, Chunk):
                    self.credit.leave(process.connection, send.message, len(send.payload or b""), is_from_broker=False)
                for time in self._arrivals(process, "up", send.channel):
                    self.timeline.plan(time, self._arrive_at_broker, process, send)
            outbox.clear()

    def flush_broker(self) -> None:
        """Puts on its way what the broker has to say, and gives its disk its orders."""
        speaker = self.machine.broker
        for send in speaker.outbox:
            process = self.processes.get(send.connection)
            if isinstance(send.message, Chunk):
                self.credit.leave(send.connection, send.message, len(send.payload or b""), is_from_broker=True)
            if process is not None:
                for time in self._arrivals(process, "down", send.channel):
                    self.timeline.plan(time, self._arrive, process, send.message, send.payload)
        speaker.outbox.clear()
        for hint in speaker.hints:
            for process in self.processes.values():
                for time in self._arrivals(process, "down", Channel.EVENTS):
                    self.timeline.plan(time, self._arrive, process, hint, None)
        speaker.hints.clear()
        self.machine.plan_disk()

    def _arrivals(self, process: Process[Any], direction: Direction, channel: Channel) -> list[float]:
        return self.network.send(
            process.connection, process.name, process.region, direction, channel, self.timeline.now
        )

    def _arrive(self, process: Process[Any], message: Message, payload: Any) -> None:
        if not process.is_alive:
            return
        if process.frozen_until > self.timeline.now:
            process.backlog.append(lambda: self._arrive(process, message, payload))
            return
        self.num_deliveries += 1
        self.timeline.say_heard(process.name, "broker", message)
        self.credit.reach(process.connection, message, is_at_broker=False)
        process.actor.receive(message, payload, process.clock.at(self.timeline.now))
        self.flush(process)

    def _arrive_at_broker(self, process: Process[Any], send: Send) -> None:
        if self.machine.is_deaf(lambda: self._arrive_at_broker(process, send)):
            return
        self.num_deliveries += 1
        self.timeline.say_heard("broker", process.name, send.message)
        self.credit.reach(process.connection, send.message, is_at_broker=True)
        self.machine.hear(broker.MessageArrived(send.channel, process.connection, send.message, send.payload))
        self.flush_broker()
