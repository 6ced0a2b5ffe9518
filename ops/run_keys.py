"""The keys of a run on one machine: one for each of its processes, in its folder, made when they are missing.

Loopback is open to all users of a machine; the files of keys are not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from isles.ops.key_delivery import Delivery, deliver
from isles.ops.key_folder import KeyFolder
from isles.ops.reach import OPERATOR_NAME
from isles.proto.key_files import client_file
from isles.proto.keys import KeyRole

ROLES: Final[dict[str, KeyRole]] = {
    OPERATOR_NAME: "operator",
    "evaluator": "operator",
    "outer": "outer",
    "worker": "worker",
}
"""Whose keys every run has; that of `worker` is for those that are started by hand."""
RELAY_ROLE: Final[KeyRole] = "relay"


def make_run_keys(folder: Path, workers: Iterable[str] = (), relays: Mapping[str, str] | None = None) -> Path:
    """Makes what is missing in a key folder, also for these workers; returns the operator's key file.

    `relays` is worker -> the relay that it dials, whose key is made, too.

    Raises ConfigError or UsageError for a folder that is damaged or cannot be written.
    """
    relays = relays or {}
    wanted = {**ROLES, **dict.fromkeys(workers, ROLES["worker"]), **dict.fromkeys(relays.values(), RELAY_ROLE)}
    deliveries = [
        Delivery(name, role, relays=(relays[name],) if name in relays else ()) for name, role in wanted.items()
    ]
    deliver(KeyFolder(folder), deliveries, int(time.time()))
    return client_file(folder, OPERATOR_NAME)
