"""What a relay's pure core needs to know besides a broker's limits. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.brokers.limits import Bytes, RoutingSettings
from isles.proto.ids import Name, NameOrNone


class RelayingSettings(RoutingSettings):
    """The limits of a broker, and what only a relay has."""

    id: NameOrNone = Field(
        default="",
        description="name of a relay; without one that of its key, and without a key `relay-` and its region",
    )
    region: Name = Field(default="local", description="region that a relay stands in")
    ack: Literal["home", "region"] = Field(
        default="home",
        description="who a worker of a relay hears of that its contribution is safe: of the home broker alone, or of "
        "the relay first, so that it need not send it again; it stays open until the home broker has it",
    )
    outbox_bytes_max: Bytes = Field(
        default=4 << 30,
        description="contributions that a relay holds until the home broker has them, in bytes; then, workers wait",
    )
    cache_bytes_max: Bytes = Field(
        default=8 << 30, description="payloads that a relay keeps for who else wants them, in bytes; the newest stay"
    )
    upstream_connections: Annotated[int, Field(ge=1, le=32)] = Field(
        default=1,
        description="connections of a relay to the home broker, over which payloads are spread: on a long way one of "
        "them may not fill the link",
    )
