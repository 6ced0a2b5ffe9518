"""The name under which a worker trains, and the lock that keeps a second process from training under it.

A learner's name is what its rows in the store and its checkpoint belong to: the same after every restart, and never
held by two processes, since the later one would fence the earlier. Without a given name the first free one of
`host`, `host-2`, `host-3` and so on is taken, so workers started by hand on one machine find theirs again.

A worker that has a key and no name is given one by its broker. It keeps it, with the token that takes it again, in the
first free slot of its checkpoint folder: workers that share a folder and a key find one identity each. Before it asks,
it keeps there as whom it asks, and it confirms an answer only when that is kept. So wherever it is killed, its next
start asks as the same one and is given the same name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final, Self, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from isles.proto.errors import UsageError
from isles.proto.ids import Name, Token, is_name

HOST_CHARACTERS_MAX: Final = 48
"""Leaves room for what makes the name unique."""

CLAIMS_MAX: Final = 1024
"""Most workers that share one checkpoint folder without names of their own."""

LOCK_NAME: Final = "worker.lock"

SLOT_PREFIX: Final = "_given-"
"""Of the folders that hold what a broker gave; no name of a learner begins like this."""

IDENTITY_NAME: Final = "identity.json"
IDENTITY_BYTES_MAX: Final = 1024
"""A name and a token take under 200."""

INCARNATION_BYTES: Final = 8
"""Random bytes of an incarnation: two starts of one process never draw the same."""

NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""A shared folder without locks: better a worker without this protection than none."""


def new_incarnation() -> str:
    """Names one start of one process."""
    return secrets.token_hex(INCARNATION_BYTES)


class Claim:
    """A name that is held, with the folder of its checkpoint, until it is closed or the process ends."""

    def __init__(
        self, name: str, folder: Path | None = None, descriptor: int | None = None, *, rejoin: str = ""
    ) -> None:
        self.name = name
        self.rejoin = rejoin
        """The token without which the broker does not give this name again; empty = the broker did not give it."""
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


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Identity(_Part):
    """What a broker gave to a worker without a name."""

    id: Name
    rejoin: Token
    """Without it the broker gives the id to nobody."""


class Asked(_Part):
    """A worker that has asked for an identity, and perhaps was given one that it did not keep."""

    asked: Token
    """As which incarnation: whoever asks as it again is given the same."""


Ask = Callable[[str], AbstractContextManager[Identity]]
"""Asks a broker as an incarnation; the identity that was given is confirmed when the context is left."""
_Kept = TypeVar("_Kept", Identity, Asked)


def claim_given(checkpoint_dir: Path | None, ask: Ask) -> Claim:
    """Holds what a broker gave: out of the first free slot of the folder, or, if there is none in it, by asking.

    Raises UsageError if the folder or what is in the slot cannot be used, and what `ask` raises.
    """
    if checkpoint_dir is None:
        with ask(new_incarnation()) as identity:
            return Claim(identity.id, rejoin=identity.rejoin)
    for number in range(1, CLAIMS_MAX):
        claim = _try_claim("", checkpoint_dir / f"{SLOT_PREFIX}{number}")
        if claim is None:
            continue
        try:
            assert claim.folder is not None
            identity = _take_identity(claim.folder, ask)
        except BaseException:
            claim.close()
            raise
        claim.name, claim.rejoin = identity.id, identity.rejoin
        return claim
    raise UsageError(f"{CLAIMS_MAX - 1} workers share the checkpoint folder {checkpoint_dir}: give this one another")


def _take_identity(folder: Path, ask: Ask) -> Identity:
    kept = _read(folder)
    if isinstance(kept, Identity):
        return kept
    asked = kept or _keep(Asked(asked=new_incarnation()), folder)
    with ask(asked.asked) as identity:
        return _keep(identity, folder)


def _read(folder: Path) -> Identity | Asked | None:
    path = folder / IDENTITY_NAME
    try:
        with path.open("rb") as file:
            data = file.read(IDENTITY_BYTES_MAX)
        return TypeAdapter(Identity | Asked).validate_json(data)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): check its owner and the disk") from error
    except ValidationError:
        raise UsageError(
            f"{path} does not hold the id of a learner: it is damaged; delete the folder {folder} to begin as a new "
            "learner there"
        ) from None


def _keep(part: _Kept, folder: Path) -> _Kept:
    """Writes it durably, whole or not at all, for its owner alone."""
    path = folder / IDENTITY_NAME
    partial = path.with_suffix(".tmp")
    try:
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(part.model_dump_json())
            file.flush()
            os.fsync(descriptor)
        partial.replace(path)
        _sync_folder(folder)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise UsageError(f"{path} cannot be written ({error.strerror}): check the folder and the disk") from error
    return part


def _sync_folder(folder: Path) -> None:
    """A broker that was told that a name is kept takes it for kept: a power failure must not bring back less."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
