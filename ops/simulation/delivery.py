"""Carries what processes and broker say to each other over the links of the simulated world."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from isles.brokers import vocabulary as broker
from isles.ops.simulation.broker_machine import BrokerMachine
from isles.ops.simulation.credit import ALLOWING, CreditBook
from isles.ops.simulation.network import Network
from isles.ops.simulation.processes import Process
from isles.ops.simulation.timeline import Timeline
from isles.proto.client import Send
from isles.proto.messages import Channel, Chunk, Hint, Message


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
        if not outbox:
            return
        connection, name, region = process.connection, process.name, process.region
        timeline, transmit = self.timeline, self.network.send
        for send in outbox:
            message = send.message
            if type(message) is Chunk:
                self.credit.leave(connection, message, len(send.payload or b""), is_from_broker=False)
            for time in transmit(connection, name, region, "up", send.channel, timeline.now):
                timeline.plan(time, self._arrive_at_broker, process, send)
        outbox.clear()

    def flush_broker(self) -> None:
        """Puts on its way what the broker has to say, and gives its disk its orders."""
        speaker = self.machine.broker
        if speaker.outbox:
            self._flush_answers(speaker.outbox)
            speaker.outbox.clear()
        if speaker.hints:
            self._flush_hints(speaker.hints)
            speaker.hints.clear()
        if speaker.orders:
            self.machine.plan_disk()

    def _flush_answers(self, outbox: list[broker.Send]) -> None:
        timeline, transmit = self.timeline, self.network.send
        for send in outbox:
            message, connection = send.message, send.connection
            if type(message) is Chunk:
                self.credit.leave(connection, message, len(send.payload or b""), is_from_broker=True)
            process = self.processes.get(connection)
            if process is not None:
                for time in transmit(connection, process.name, process.region, "down", send.channel, timeline.now):
                    timeline.plan(time, self._arrive, process, message, send.payload)

    def _flush_hints(self, hints: list[Hint]) -> None:
        timeline, transmit = self.timeline, self.network.send
        for hint in hints:
            for connection, process in self.processes.items():
                for time in transmit(connection, process.name, process.region, "down", Channel.EVENTS, timeline.now):
                    timeline.plan(time, self._arrive, process, hint, None)

    def _arrive(self, process: Process[Any], message: Message, payload: Any) -> None:
        if not process.is_alive:
            return
        timeline = self.timeline
        if process.frozen_until > timeline.now:
            process.backlog.append(lambda: self._arrive(process, message, payload))
            return
        self.num_deliveries += 1
        timeline.say_heard(process.name, "broker", message)
        if type(message) in ALLOWING:
            self.credit.reach(process.connection, message, is_at_broker=False)
        actor = process.actor
        actor.receive(message, payload, process.clock.at(timeline.now))
        if actor.outbox:
            self.flush(process)

    def _arrive_at_broker(self, process: Process[Any], send: Send) -> None:
        if self.machine.is_deaf(self._arrive_at_broker, process, send):
            return
        message, connection = send.message, process.connection
        self.num_deliveries += 1
        self.timeline.say_heard("broker", process.name, message)
        if type(message) in ALLOWING:
            self.credit.reach(connection, message, is_at_broker=True)
        self.machine.hear(broker.MessageArrived(send.channel, connection, message, send.payload))
        self.flush_broker()
