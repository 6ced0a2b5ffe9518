"""Where a broker listens: one host and three ports.

`tcp://HOST:PORT` means control on PORT, bulk on PORT + 1, events on PORT + 2; `tcp://HOST:A,B,C` names all three.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final, Self

from pydantic import AfterValidator, Field

from isles.proto.errors import ConfigError

if TYPE_CHECKING:
    from isles.proto.messages import Channel

_PATTERN: Final = re.compile(r"^tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(?P<ports>\d+(?:,\d+,\d+)?)$")
PORT_MAX: Final = 65_535
DEFAULT_BROKER: Final = "tcp://127.0.0.1:7700"
"""Where a broker listens, and everybody looks for one, unless told otherwise."""


@dataclass(frozen=True)
class Address:
    """The three endpoints of one broker."""

    host: str
    control_port: int
    bulk_port: int
    events_port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads an address that a person gave. Raises ConfigError with the accepted forms."""
        match = _PATTERN.match(text.strip())
        if match is None:
            raise ConfigError(f"{text!r} is no broker address: write tcp://HOST:PORT or tcp://HOST:PORT,PORT,PORT")
        ports = [int(port) for port in match["ports"].split(",")]
        if len(ports) == 1:
            ports = [ports[0], ports[0] + 1, ports[0] + 2]
        if not all(0 < port <= PORT_MAX for port in ports):
            raise ConfigError(f"{text!r}: ports are 1 to {PORT_MAX}, and a single one needs two more after it")
        return cls(match["host"], *ports)

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.control_port},{self.bulk_port},{self.events_port}"

    @property
    def control(self) -> str:
        return f"tcp://{self.host}:{self.control_port}"

    @property
    def bulk(self) -> str:
        return f"tcp://{self.host}:{self.bulk_port}"

    @property
    def events(self) -> str:
        return f"tcp://{self.host}:{self.events_port}"

    def of(self, channel: Channel) -> str:
        """The endpoint of one channel."""
        return {"control": self.control, "bulk": self.bulk, "events": self.events}[channel]

    def from_here(self) -> Address:
        """The same broker as a process of its own machine dials it: nobody can dial an address that means all."""
        host = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(self.host, self.host)
        return replace(self, host=host)


def _check_address(text: str) -> str:
    try:
        Address.parse(text)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return text


BrokerAddress = Annotated[str, Field(max_length=512), AfterValidator(_check_address)]
"""Of a setting that names a broker: text that `Address.parse` takes."""


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach a socket bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
