"""Every setting of a broker process, a home broker or a relay: where it listens and keeps its store, and what its cores
need.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from isles.brokers.limits import Seconds
from isles.brokers.relay.limits import RelayingSettings
from isles.proto.transport.address import BrokerAddress, is_loopback
from isles.proto.transport.bounds import CONNECTIONS_PER_KEY_MAX, WAITING_BYTES_MAX

BIND_PATTERN = r"^tcp://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)$"


class BrokerSettings(RelayingSettings):
    """All settings of a broker process."""

    store: Path = Field(default=Path("store"), description="folder of the store")
    keys: Path | None = Field(
        default=None,
        description="key folder made by `isles keys`: the broker's own key, and whom it lets in; needed for any "
        "address but loopback",
    )
    bind: Annotated[str, StringConstraints(max_length=255, pattern=BIND_PATTERN)] = Field(
        default="tcp://127.0.0.1",
        description="address to listen on, as tcp://HOST; anything but loopback needs keys",
    )
    port: Annotated[int, Field(ge=0, le=65_533)] = Field(
        default=7700, description="port for control; bulk and events are the next two; 0 takes three free ones"
    )
    upstream: BrokerAddress | None = Field(
        default=None,
        description="address of the home broker, as tcp://HOST:PORT: with it this is a relay, which hands over to that "
        "broker what the workers of its region send; without it this is the home broker of a run",
    )
    upstream_key: Path | None = Field(
        default=None,
        description="key file of a relay, made by `isles keys`: it shows it to the home broker, and to its workers",
    )
    waiting_bytes_max: Annotated[int, Field(ge=64 << 20, lt=2**53)] = Field(
        default=WAITING_BYTES_MAX,
        description="memory for what waits in the sockets to be read or to be sent, in bytes; beyond it, the "
        "connections that hold the most are cut",
    )
    connections_per_key_max: Annotated[int, Field(ge=8, le=1 << 20)] = Field(
        default=CONNECTIONS_PER_KEY_MAX,
        description="connections that one key may have open; each process has three",
    )
    num_disk_threads: Annotated[int, Field(ge=1, le=64)] = Field(
        default=2, description="threads that write, hash and read payloads"
    )
    tick_seconds: Seconds = Field(
        default=0.25, description="longest wait between two looks at leases and deadlines, in seconds"
    )

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        if not is_loopback(self.host) and self.keys is None and self.upstream_key is None:
            remedy = (
                "Make keys with `isles keys new` and name their folder with keys = ..., or listen on tcp://127.0.0.1"
                if self.upstream is None
                else "Make a key with the role relay where the home broker's keys are, and name it with --key"
            )
            raise ValueError(
                f"bind = {self.bind} can be reached from other machines, and there are no keys: whoever reaches it "
                f"could read and change the run. {remedy}"
            )
        return self

    @model_validator(mode="after")
    def _check_relay(self) -> Self:
        if self.upstream is None and self.upstream_key is not None:
            raise ValueError(
                "upstream_key is a relay's, and upstream is not set: name the home broker with upstream = ..., or, "
                "for a home broker, its key folder with keys = ..."
            )
        if self.upstream is not None and self.keys is not None:
            raise ValueError(
                "keys is the folder of a home broker, and upstream makes this a relay, whom the home broker tells whom "
                "to let in: name the relay's own key with upstream_key = ... instead"
            )
        return self

    @property
    def host(self) -> str:
        """The host part of `bind`."""
        return self.bind.removeprefix("tcp://")

    @property
    def ports(self) -> tuple[int, int, int]:
        """Control, bulk and events; zeros take free ones."""
        return (self.port, self.port + 1, self.port + 2) if self.port else (0, 0, 0)
