"""The commands `broker`, `outer`, `worker` and `evaluate`: settings in, one process's loop, exit code out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from isles.proto.config import Config
from isles.proto.logs import Logger

PARENT_GRACE_SECONDS: Final = 5.0
"""A process whose supervisor died gets this long to stop: nobody would kill it later."""


@dataclass(frozen=True)
class _Process:
    """What is particular to one process command."""

    role: str
    section: str
    others: tuple[tuple[str, str], ...]
    """Further sections that it takes as dotted flags, each with the heading of its options."""
    text: str
    serve: Callable[[Config, Logger, threading.Event], int]


def _serve_broker(config: Config, logger: Logger, should_stop: threading.Event) -> int:
    from isles.brokers.broker import serve
    from isles.brokers.settings import BrokerSettings

    return serve(config.section("broker", BrokerSettings), logger=logger, should_stop=should_stop)


def _serve_outer(config: Config, logger: Logger, should_stop: threading.Event) -> int:
    from isles.outer.outer import serve
    from isles.outer.settings import OuterSettings

    return serve(config.section("outer", OuterSettings), logger=logger, should_stop=should_stop)
