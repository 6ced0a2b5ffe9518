"""A key folder and what an operator does with it: new keys, other keys in their place, and keys no longer.

Every change leaves files that work, at whatever moment it is cut off: what is let in is written before what uses it,
and a client's list of broker keys before the broker's own key.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isles.proto.errors import ConfigError, UsageError
from isles.proto.key_files import (
    ALLOW_LIST_FILE,
    BROKER_FILE,
    BROKER_NAME,
    client_file,
    generate_pair,
    read_allow_list,
    read_broker_key,
    read_client_key,
    write_allow_list,
    write_broker_key,
    write_client_key,
)
from isles.proto.keys import (
    BROKER_KEYS_MAX,
    RELAY_KEYS_MAX,
    AllowedKey,
    AllowList,
    BrokerKey,
    ClientKey,
    KeyRole,
)

FOLDER_MODE: Final = 0o700
KEYS_PER_NAME_MAX: Final = 4
"""Keys of one name that are let in at once: two while a key is being changed, and room for a change that was left half
done."""


@dataclass(frozen=True)
class BrokerRotation:
    """What became of the client files when the broker's key was changed."""

    public: str
    rewritten: tuple[Path, ...]
    elsewhere: tuple[str, ...]
    """Names that are let in, and whose file is not in this folder."""


class KeyFolder:
    """One key folder. Every method raises ConfigError for files that are damaged or cannot be written."""

    def __init__(self, folder: Path) -> None:
        """Touches nothing."""
        self.path = folder

    @property
    def exists(self) -> bool:
        """Whether a broker could use it."""
        return (self.path / BROKER_FILE).exists()

    def allowed(self) -> AllowList:
        """Whom the broker lets in. Raises UsageError if there is no such folder."""
        self._require()
        return read_allow_list(self.path)

    def broker_public(self) -> str:
        """The public key (z85) of the broker."""
        self._require()
        return read_broker_key(self.path).public

    def has_file(self, name: str) -> bool:
        """Whether the key file of `name` is here."""
        return client_file(self.path, name).exists()

    # ---------------------------------------------------------------------------------------------------- changing it

    def make(self, now_unix: int) -> bool:
        """The folder, an empty allow-list and the broker's own pair, unless they are there; whether they are new."""
        with self._locked():
            return self._make(now_unix)

    def add(self, name: str, role: KeyRole, now_unix: int, *, relays: Sequence[str] = ()) -> Path:
        """Lets a new key of a new name in; its file, which names the keys of `relays`. Makes the folder on first use.

        Raises UsageError for a name that has a key already, or a relay that has none.
        """
        path = client_file(self.path, name)
        with self._locked():
            self._make(now_unix)
            allowed = read_allow_list(self.path)
            if allowed.of(name):
                raise UsageError(
                    f"{name} has a key already, in {self.path}: give it another one with `isles keys rotate {name}`, "
                    "or choose another name"
                )
            return self._add(allowed, path, name, role, now_unix, _keys_of_relays(allowed, relays))

    def name_relays(self, name: str, relays: Sequence[str]) -> bool:
        """Has the file of a name name the keys of these relays and of no others; whether it did not before.

        Raises UsageError for a relay that has no key.
        """
        path = client_file(self.path, name)
        with self._changing():
            wanted = _keys_of_relays(read_allow_list(self.path), relays)
            key = read_client_key(path)
            if key.relays == wanted:
                return False
            write_client_key(path, key.model_copy(update={"relays": wanted}))
            return True

    def rotate(self, name: str, now_unix: int) -> Path:
        """Lets a second key of a name in, and rewrites its file; the earlier one stays valid until `retire`.

        The files here that name it as a relay name the second key, too, from this moment.
        """
        path = client_file(self.path, name)
        with self._changing():
            allowed = read_allow_list(self.path)
            keys = self._keys_of(allowed, name)
            if len(keys) >= KEYS_PER_NAME_MAX:
                raise UsageError(
                    f"{name} has {len(keys)} keys at once: end the earlier ones with `isles keys revoke {name} --old` "
                    "first"
                )
            return self._add(allowed, path, name, keys[0].role, now_unix)

    def revoke(self, name: str) -> int:
        """Lets no key of a name in any more, and deletes its file; how many there were."""
        path = client_file(self.path, name)
        with self._changing():
            allowed = read_allow_list(self.path)
            keys = self._keys_of(allowed, name)
            write_allow_list(self.path, allowed.without(*keys))
            path.unlink(missing_ok=True)
            if keys[0].role == "relay":
                self._follow_relays(allowed)
            return len(keys)

    def retire(self, name: str) -> int:
        """Lets only the newest key of a name in; how many earlier ones there were."""
        client_file(self.path, name)
        with self._changing():
            allowed = read_allow_list(self.path)
            old = self._keys_of(allowed, name)[:-1]
            if old:
                write_allow_list(self.path, allowed.without(*old))
                if old[0].role == "relay":
                    self._follow_relays(allowed)
            return len(old)

    def files_with_relay(self, name: str) -> tuple[Path, ...]:
        """The client files here that name a key of this relay."""
        publics = {key.public for key in self.allowed().of(name)}
        return tuple(path for path, key in self._client_files().items() if publics & set(key.relays))

    def rotate_broker(self, now_unix: int) -> BrokerRotation:
        """Another pair for the broker's next start; the client files here list it beside those they have."""
        with self._changing():
            present = read_broker_key(self.path)
            pair = generate_pair()
            files = self._client_files()
            for path, key in files.items():
                known = [*(public for public in key.broker if public != present.public), present.public, pair.public]
                write_client_key(path, key.model_copy(update={"broker": tuple(known[-BROKER_KEYS_MAX:])}))
            write_broker_key(self.path, BrokerKey(public=pair.public, secret=pair.secret, made_unix=now_unix))
            return BrokerRotation(pair.public, tuple(files), self._elsewhere(files))

    def retire_broker(self) -> BrokerRotation:
        """Takes all but the present key of the broker out of the client files here."""
        with self._changing():
            present = read_broker_key(self.path)
            files = {path: key for path, key in self._client_files().items() if key.broker != (present.public,)}
            for path, key in files.items():
                write_client_key(path, key.model_copy(update={"broker": (present.public,)}))
            return BrokerRotation(present.public, tuple(files), self._elsewhere(self._client_files()))

    # ---------------------------------------------------------------------------------------------------------- inside

    def _make(self, now_unix: int) -> bool:
        if self.exists:
            return False
        if (self.path / ALLOW_LIST_FILE).exists():
            if read_allow_list(self.path).keys:
                raise ConfigError(
                    f"{self.path} has an {ALLOW_LIST_FILE} but no {BROKER_FILE}: put the broker's key back, or start "
                    "with an empty folder"
                )
        else:
            write_allow_list(self.path, AllowList())
        pair = generate_pair()
        write_broker_key(self.path, BrokerKey(public=pair.public, secret=pair.secret, made_unix=now_unix))
        return True

    def _add(
        self,
        allowed: AllowList,
        path: Path,
        name: str,
        role: KeyRole,
        now_unix: int,
        relays: tuple[str, ...] = (),
    ) -> Path:
        pair = generate_pair()
        broker: tuple[str, ...] = (read_broker_key(self.path).public,)
        with suppress(ConfigError):  # of a file that cannot be read, nothing is kept
            before = read_client_key(path)
            # While the broker's own key is being changed, a client must know both.
            broker = tuple(dict.fromkeys((*before.broker, *broker)))[-BROKER_KEYS_MAX:]
            relays = relays or before.relays
        entry = AllowedKey(name=name, role=role, public=pair.public, made_unix=now_unix)
        write_allow_list(self.path, allowed.with_key(entry))
        if role == "relay":
            self._follow_relays(allowed)
        key = ClientKey(
            name=name,
            role=role,
            public=pair.public,
            secret=pair.secret,
            broker=broker,
            relays=relays,
            made_unix=now_unix,
        )
        write_client_key(path, key)
        return path

    def _follow_relays(self, before: AllowList) -> None:
        """Has the client files here name the keys that their relays have now; `before` is the list so far."""
        present = read_allow_list(self.path)
        for path, key in self._client_files().items():
            found = (before.find(public) for public in key.relays)
            names = dict.fromkeys(relay.name for relay in found if relay is not None)
            relays = tuple(one.public for name in names for one in present.of(name))[:RELAY_KEYS_MAX]
            if relays != key.relays:
                write_client_key(path, key.model_copy(update={"relays": relays}))

    def _client_files(self) -> dict[Path, ClientKey]:
        paths = sorted(path for path in self.path.glob("*.key") if path.name != BROKER_FILE)
        return {path: read_client_key(path) for path in paths}

    def _elsewhere(self, files: dict[Path, ClientKey]) -> tuple[str, ...]:
        here = {path.stem for path in files}
        return tuple(sorted({key.name for key in read_allow_list(self.path).keys} - here))

    def _keys_of(self, allowed: AllowList, name: str) -> tuple[AllowedKey, ...]:
        keys = allowed.of(name)
        if not keys:
            known = ", ".join(sorted({key.name for key in allowed.keys})[:10]) or "nobody yet"
            raise UsageError(f"{name} has no key in {self.path}: it lets in {known}")
        return keys

    def _require(self) -> None:
        if not self.exists:
            raise UsageError(
                f"there is no key folder at {self.path}: make one with `isles keys new NAME --role ROLE`, or name "
                "another with --keys"
            )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self._require()
        with self._locked():
            yield

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One change at a time: two commands that read the list, and then write it, would lose an entry."""
        try:
            self.path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be a key folder ({error.strerror}): name another") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _keys_of_relays(allowed: AllowList, names: Sequence[str]) -> tuple[str, ...]:
    """The public keys of some relays. Raises UsageError for a name that is no relay's, or too many of them."""
    publics: list[str] = []
    for name in names:
        keys = allowed.of(name)
        if not keys or keys[0].role != "relay":
            raise UsageError(f"{name} is no relay that has a key: make one first, `isles keys new {name} --role relay`")
        publics += [key.public for key in keys if key.public not in publics]
    if len(publics) > RELAY_KEYS_MAX:
        raise UsageError(f"{', '.join(names)} have {len(publics)} keys; one file names at most {RELAY_KEYS_MAX}")
    return tuple(publics)


def is_broker(name: str) -> bool:
    """Whether a name on the command line means the broker's own key."""
    return name == BROKER_NAME
