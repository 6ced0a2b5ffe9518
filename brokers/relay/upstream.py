"""The links of a relay to its home broker: each is a client of its own, which asks until it is answered. Pure.

    link 0          says the beats, passes all small messages on, and hears hints; payloads as well
    all the others  payloads alone

A link that is cut costs nothing but time: what was not answered is asked again.
"""

from __future__ import annotations

from dataclasses import dataclass

from isles.brokers.relay.vocabulary import Instruction, SendUp
from isles.brokers.vocabulary import Bytes
from isles.proto import client
from isles.proto.client import Answered, Client, Fetched, FetchFailed, Hinted, Refused, Send, Welcomed
from isles.proto.ids import NAME_LENGTH_MAX, Name, Token
from isles.proto.messages import BlobRef, Chunk, Hello

News = Welcomed | Answered | Fetched | FetchFailed | Hinted | Refused


@dataclass
class Links:
    """All links, and what passed over them since this relay started."""

    clients: list[Client]
    bytes_up: int = 0
    bytes_down: int = 0

    def split(self, link: int, instructions: list[client.Instruction]) -> tuple[list[Instruction], list[News]]:
        """What is to be sent on a link, and the news that came of it."""
        orders: list[Instruction] = []
        news: list[News] = []
        for instruction in instructions:
            if not isinstance(instruction, Send):
                news.append(instruction)
                continue
            payload = instruction.payload
            if isinstance(instruction.message, Chunk) and payload is not None:
                self.bytes_up += len(payload)
            orders.append(SendUp(link, instruction.channel, instruction.message, payload))
        return orders, news

    def note_chunk(self, payload: Bytes | None) -> None:
        """A piece of a blob came from the home broker."""
        self.bytes_down += 0 if payload is None else len(payload)

    def fetch(self, link: int, blob: BlobRef, now: float, bytes_max: int) -> tuple[list[Instruction], list[News]]:
        """Brings a blob by this link."""
        return self.split(link, self.clients[link].fetch(blob, now, bytes_max=bytes_max))


def make_links(relay: Name, incarnation: Token, region: Name, num: int) -> Links:
    """So many links, none of which has said anything yet."""
    names = [relay, *(f"{relay[: NAME_LENGTH_MAX - 3].rstrip('._-')}.{number}" for number in range(2, num + 1))]
    return Links([Client(Hello(role="relay", id=name, incarnation=incarnation, region=region)) for name in names])
