"""The files of keys: read, written and watched, and new pairs for them.

A file that is missing, damaged, too long or open to others is one clear sentence; what is written is there as a whole
or not at all.
"""

from __future__ import annotations

import os
import secrets
import stat
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from isles.proto.config import TOML_FAULTS
from isles.proto.errors import ConfigError
from isles.proto.ids import NAME_LENGTH_MAX, is_name
from isles.proto.keys import AllowList, BrokerKey, ClientKey, KeyPair, Part, validated

KEY_FILE_BYTES_MAX: Final = 16 << 10
"""Longest file with a pair of keys: all of them are under 1 KB; more is some other file."""
ALLOW_LIST_BYTES_MAX: Final = 1 << 20
"""Longest allow-list: 4096 entries of the longest names take 700 KB."""
BROKER_FILE: Final = "broker.key"
ALLOW_LIST_FILE: Final = "allowed.toml"
BROKER_NAME: Final = "broker"
"""Taken: its file is the broker's own."""
SECRET_MODE: Final = 0o600
PUBLIC_MODE: Final = 0o644

_NEW_KEY: Final = "put it back, or make a new one with `isles keys`"
_NEW_FOLDER: Final = "put a copy of it back, or make all keys anew in an empty folder"
"""What helps where the file that every command on keys needs cannot be used: no command makes another one."""

_Model = TypeVar("_Model", bound=Part)


def client_file(folder: Path, name: str) -> Path:
    """Where the key of `name` is kept. Raises ConfigError for a name that no key may have."""
    if name == BROKER_NAME:
        raise ConfigError(f"{BROKER_NAME!r} is the broker itself: give this key another name")
    if not is_name(name):
        raise ConfigError(
            f"{name!r:.80} cannot name a key: up to {NAME_LENGTH_MAX} lower-case letters, digits, dots, dashes and "
            "underscores, beginning and ending without a mark"
        )
    return folder / f"{name}.key"


# ------------------------------------------------------------------------------------------------------------- reading


def read_client_key(path: Path) -> ClientKey:
    """The key of one process. Raises ConfigError, one sentence, for a file that cannot be used."""
    key = _read(path, ClientKey, KEY_FILE_BYTES_MAX, "key file", _NEW_KEY, is_secret=True)
    key._path = str(path)  # noqa: SLF001 - where it lies is no field of it
    return key


def read_broker_key(folder: Path) -> BrokerKey:
    """The broker's own pair out of a key folder. Raises ConfigError as `read_client_key`."""
    path = folder / BROKER_FILE
    return _read(path, BrokerKey, KEY_FILE_BYTES_MAX, "key file of the broker", _NEW_FOLDER, is_secret=True)


def read_allow_list(folder: Path) -> AllowList:
    """Whom the broker of a key folder lets in. Raises ConfigError as `read_client_key`."""
    path = folder / ALLOW_LIST_FILE
    return _read(path, AllowList, ALLOW_LIST_BYTES_MAX, "allow-list", _NEW_FOLDER, is_secret=False)


class KeyWatch:
    """Notices that the file of a key was written anew. A key that came from no file never changes."""

    def __init__(self, key: ClientKey) -> None:
        self._key = key
        self._stamp: tuple[int, int, int] | None = None

    def newer(self) -> ClientKey | None:
        """The key that stands in the file by now, if it is another one; a file that cannot be used changes nothing."""
        stamp = self._read_stamp()
        if stamp is None or stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            key = read_client_key(Path(self._key.path))
            key = key.for_relay() if self._key.is_for_relay else key
        except ConfigError:
            return None
        is_same, self._key = key.model_dump() == self._key.model_dump(), key
        return None if is_same else key

    def _read_stamp(self) -> tuple[int, int, int] | None:
        if not self._key.path:
            return None
        try:
            found = Path(self._key.path).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path, model: type[_Model], bytes_max: int, what: str, cure: str, *, is_secret: bool) -> _Model:
    data = _read_bytes(path, bytes_max, what, is_secret=is_secret)
    if not data.strip():  # as TOML it would be a list of nobody; it is what a full disk or a copy under way leaves
        raise ConfigError(f"{path} is no {what}: it is empty; {cure}")
    try:
        values = tomllib.loads(data.decode())
    except TOML_FAULTS:
        raise ConfigError(f"{path} is no {what}: it is not TOML; {cure}") from None
    if kind := _other_kind(model, values):
        raise ConfigError(f"{path} is no {what}: it is {kind}; {cure}")
    return validated(model, values, f"{path} is no {what} that can be used")


def _other_kind(model: type[Part], values: dict[str, object]) -> str:
    """What else a file is that was taken for one of this kind; empty if it may well be one."""
    if model is not ClientKey and {"secret", "broker"} <= values.keys():
        return "the key of a process"
    if model is not BrokerKey and "secret" in values and "name" not in values:
        return "the broker's own key"
    if model is not AllowList and "keys" in values:
        return "an allow-list"
    return ""


def _read_bytes(path: Path, bytes_max: int, what: str, *, is_secret: bool) -> bytes:
    try:
        # Without O_NONBLOCK a named pipe would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ConfigError(f"there is no {what} at {path}: make one with `isles keys new`, or name another") from None
    except OSError as error:
        raise ConfigError(f"the {what} {path} cannot be read ({error.strerror}): check its owner and path") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is no {what}: it is no plain file")
        if is_secret and found.st_mode & 0o077:
            raise ConfigError(
                f"the {what} {path} is open to other users of this machine (mode {stat.S_IMODE(found.st_mode):04o}): "
                f"close it with `chmod 600 {path}`, and make a new key if somebody may have read it"
            )
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(f"the {what} {path} cannot be read ({error.strerror}): check the disk") from None
    finally:
        os.close(descriptor)
    if len(data) > bytes_max:
        raise ConfigError(f"{path} is no {what}: it is longer than {bytes_max} bytes")
    return data


# ------------------------------------------------------------------------------------------------------------- writing


def write_client_key(path: Path, key: ClientKey) -> None:
    """Writes the file of one process, whole or not at all, for its owner alone. Raises ConfigError."""
    head = f"# The key of {key.role} {key.name}: carry it to that process and show it to nobody."
    broker = ", ".join(f'"{public}"' for public in key.broker)
    lines = [head, f'name = "{key.name}"', f'role = "{key.role}"', *_pair_lines(key), f"broker = [{broker}]"]
    if key.relays:
        relays = ", ".join(f'"{public}"' for public in key.relays)
        lines.append(f"relays = [{relays}]")
    _write(path, [*lines, f"made_unix = {key.made_unix}"], SECRET_MODE)


def write_broker_key(folder: Path, key: BrokerKey) -> None:
    """Writes the broker's own pair into its key folder. Raises ConfigError."""
    lines = ["# The broker's own key: it stays with the broker.", *_pair_lines(key), f"made_unix = {key.made_unix}"]
    _write(folder / BROKER_FILE, lines, SECRET_MODE)


def write_allow_list(folder: Path, allowed: AllowList) -> None:
    """Writes the allow-list of a key folder; a broker that runs reads it again by itself. Raises ConfigError."""
    lines = ["# Whom the broker lets in; `isles keys` writes this file."]
    for key in allowed.keys:
        lines += ["", "[[keys]]", f'name = "{key.name}"', f'role = "{key.role}"', f'public = "{key.public}"']
        lines.append(f"made_unix = {key.made_unix}")
    _write(folder / ALLOW_LIST_FILE, lines, PUBLIC_MODE)


def _pair_lines(pair: KeyPair) -> list[str]:
    return [f'public = "{pair.public}"', f'secret = "{pair.secret}"']


def _write(path: Path, lines: list[str], mode: int) -> None:
    # Not by the process's id: in a container it is the same at every start, and a killed one leaves its file.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, mode)
            file.write("\n".join(lines) + "\n")
            file.flush()
            os.fsync(descriptor)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ConfigError(f"{path} cannot be written ({error.strerror}): check the folder and its owner") from None


# ---------------------------------------------------------------------------------------------------------- generating


def generate_pair() -> KeyPair:
    """A new random pair. Raises ConfigError where libzmq was built without CURVE."""
    import zmq

    check_curve()
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public.decode(), secret=secret.decode())


def check_curve() -> None:
    """Raises ConfigError where libzmq was built without CURVE."""
    import zmq

    if not zmq.has("curve"):
        raise ConfigError(
            "this libzmq was built without CURVE, so it cannot use keys: install the pyzmq wheel of PyPI, which has it "
            "(pip install --force-reinstall --only-binary :all: pyzmq)"
        )
