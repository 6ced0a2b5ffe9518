"""The name under which a worker trains, and the lock that keeps a second process from training under it.

A learner's name is what its rows in the store and its checkpoint belong to: the same after every restart, and never
held by two processes, since the later one would fence the earlier. Without a given name the first free one of
`host`, `host-2`, `host-3` and so on is taken, so workers started by hand on one machine find theirs again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import Final, Self

from isles.proto.errors import UsageError
from isles.proto.ids import is_name

HOST_CHARACTERS_MAX: Final = 48
"""Leaves room for what makes the name unique."""

CLAIMS_MAX: Final = 1024
"""Most workers that share one checkpoint folder without names of their own."""

LOCK_NAME: Final = "worker.lock"

NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""A shared folder without locks: better a worker without this protection than none."""


class Claim:
    """A name that is held, with the folder of its checkpoint, until it is closed or the process ends."""

    def __init__(self, name: str, folder: Path | None = None, descriptor: int | None = None) -> None:
        self.name = name
        self.folder = folder
        """Where this learner's checkpoint belongs; None = it writes none."""
        self._descriptor = descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets others have the name; idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def claim_learner(name: str, checkpoint_dir: Path | None, *, host: str) -> Claim:
    """Holds the name of a learner: `name`, or one made from `host` if it is empty.

    Raises UsageError if another process holds the name, or the folder cannot be written.
    """
    base = name or host_name(host)
    if checkpoint_dir is None:
        return Claim(name or f"{base}-{secrets.token_hex(3)}")
    for number in range(1, 2 if name else CLAIMS_MAX):
        candidate = base if number == 1 else f"{base}-{number}"
        claim = _try_claim(candidate, checkpoint_dir / candidate)
        if claim is not None:
            return claim
    raise UsageError(
        f"another process on this machine runs learner {base} with the checkpoint folder {checkpoint_dir}: give this "
        "worker a name of its own with --id, or another --checkpoint-dir"
    )


def host_name(host: str) -> str:
    """A legal name from a machine's; for the machine without a usable one it is `worker`."""
    name = re.sub(r"[^a-z0-9._-]+", "-", host.lower())[:HOST_CHARACTERS_MAX].strip("._-")
    return name if is_name(name) else "worker"


def _try_claim(name: str, folder: Path) -> Claim | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(
            f"the checkpoint folder {folder} cannot be written ({error.strerror}): name another with --checkpoint-dir"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return Claim(name, folder, descriptor)
