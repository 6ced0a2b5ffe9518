"""Keys: who may talk to a broker, and how a process proves which key it has.

A key is a pair of CURVE keys, each written as 40 characters of z85. The public half is a name for its owner; the
secret half never leaves its file. One folder, made by `isles keys`, holds what a broker needs:

    broker.key      the broker's own pair; readable by its owner alone
    allowed.toml    the allow-list: name, role and public key of everybody who is let in
    NAME.key        for the process NAME, and the only file it needs: its pair, and the public keys of its broker

Every file is TOML. A file that is missing, damaged, too long or open to others is one clear sentence, never a guess.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from isles.proto.errors import ConfigError
from isles.proto.ids import NAME_LENGTH_MAX, Name

KEY_LENGTH: Final = 40
"""Characters of one key: z85 writes its 32 bytes as 8 groups of 5 characters."""
Z85_ALPHABET: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
"""Digits of z85 in order of their value; none of them needs an escape in TOML."""
BROKER_KEYS_MAX: Final = 4
"""Public keys of its broker that one client file lists: the present one and the next one, and room for a mistake."""
ALLOWED_MAX: Final = 4096
"""Keys of one allow-list: as many as there may be learners."""
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

KeyRole = Literal["worker", "outer", "relay", "operator"]
"""What the owner of a key may be; an operator's key also serves an evaluator."""
KEY_ROLES: Final[tuple[KeyRole, ...]] = ("worker", "outer", "relay", "operator")


def is_key(text: str) -> bool:
    """Whether `text` is one CURVE key in z85: 40 characters whose groups of five stay within 32 bits."""
    if len(text) != KEY_LENGTH or any(character not in Z85_ALPHABET for character in text):
        return False
    for start in range(0, KEY_LENGTH, 5):
        value = 0
        for character in text[start : start + 5]:
            value = value * 85 + Z85_ALPHABET.index(character)
        if value >> 32:
            return False
    return True


def _check_key(text: str) -> str:
    if not is_key(text):
        raise ValueError(f"is no key: a key is {KEY_LENGTH} characters of z85")
    return text


Z85Key = Annotated[str, AfterValidator(_check_key)]
"""One CURVE key as text."""


class _Part(BaseModel):
    """What stands in a file of keys; a message about it never repeats a value, which may be a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class KeyPair(_Part):
    """A public key and the secret one that proves it."""

    public: Z85Key
    secret: Annotated[Z85Key, Field(repr=False)]


class BrokerKey(KeyPair):
    """The broker's own pair: what a client checks before it says anything."""

    made_unix: Annotated[int, Field(ge=0)] = 0


class ClientKey(KeyPair):
    """What one process carries to talk to one broker."""

    name: Name
    role: KeyRole
    broker: Annotated[tuple[Z85Key, ...], Field(min_length=1, max_length=BROKER_KEYS_MAX)]
    """Public keys of the broker, tried in turn: the present one, and the next one while it is being changed."""
    made_unix: Annotated[int, Field(ge=0)] = 0
    _path: Path | None = PrivateAttr(default=None)

    @property
    def path(self) -> Path | None:
        """The file it was read from, if there is one."""
        return self._path


class AllowedKey(_Part):
    """One entry of the allow-list."""

    name: Name
    role: KeyRole
    public: Z85Key
    made_unix: Annotated[int, Field(ge=0)] = 0


class AllowList(_Part):
    """Everybody whom a broker lets in. A name may have several keys at once, all of one role."""

    keys: Annotated[tuple[AllowedKey, ...], Field(max_length=ALLOWED_MAX)] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        roles: dict[str, str] = {}
        for key in self.keys:
            if roles.setdefault(key.name, key.role) != key.role:
                raise ValueError(f"{key.name} has two roles, {roles[key.name]} and {key.role}: a name has one")
        if len(self._by_public) != len(self.keys):
            raise ValueError("one public key stands in it twice: remove one of the two entries")
        return self

    @cached_property
    def _by_public(self) -> dict[str, AllowedKey]:
        return {key.public: key for key in self.keys}

    def find(self, public: str) -> AllowedKey | None:
        """The entry of a public key (z85); None = nobody we know."""
        return self._by_public.get(public)

    def of(self, name: str) -> tuple[AllowedKey, ...]:
        """All keys of one name, the oldest first."""
        return tuple(sorted((key for key in self.keys if key.name == name), key=lambda key: key.made_unix))

    def with_key(self, key: AllowedKey) -> AllowList:
        """This list and one more entry. Raises ConfigError if its name has another role, or it is there already."""
        return _validate(AllowList, {"keys": (*self.keys, key)}, "the allow-list")

    def without(self, *keys: AllowedKey) -> AllowList:
        """This list less some entries."""
        return AllowList(keys=tuple(key for key in self.keys if key not in keys))

    def __iter__(self) -> Iterator[AllowedKey]:  # type: ignore[override]  # a list of keys is read as one
        return iter(self.keys)


def client_file(folder: Path, name: str) -> Path:
    """Where the key of `name` is kept. Raises ConfigError for a name that no key may have."""
    if name == BROKER_NAME:
        raise ConfigError(f"{BROKER_NAME!r} is the broker itself: give this key another name")
    if re.fullmatch(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?", name) is None or len(name) > NAME_LENGTH_MAX:
        raise ConfigError(
            f"{name!r:.80} cannot name a key: up to {NAME_LENGTH_MAX} lower-case letters, digits, dots, dashes and "
            "underscores, beginning and ending without a mark"
        )
    return folder / f"{name}.key"


# ------------------------------------------------------------------------------------------------------------- reading


def read_client_key(path: Path) -> ClientKey:
    """The key of one process. Raises ConfigError, one sentence, for a file that cannot be used."""
    key = _read(path, ClientKey, KEY_FILE_BYTES_MAX, "key file", is_secret=True)
    key._path = path  # noqa: SLF001 - where it lies is no field of it
    return key


def read_broker_key(folder: Path) -> BrokerKey:
    """The broker's own pair out of a key folder. Raises ConfigError as `read_client_key`."""
    return _read(folder / BROKER_FILE, BrokerKey, KEY_FILE_BYTES_MAX, "key file of the broker", is_secret=True)


def read_allow_list(folder: Path) -> AllowList:
    """Whom the broker of a key folder lets in. Raises ConfigError as `read_client_key`."""
    return _read(folder / ALLOW_LIST_FILE, AllowList, ALLOW_LIST_BYTES_MAX, "allow-list", is_secret=False)


class KeyWatch:
    """Notices that the file of a key was written anew. A key that came from no file never changes."""

    def __init__(self, key: ClientKey) -> None:
        self._key = key
        self._stamp: tuple[int, int, int] | None = None

    def newer(self) -> ClientKey | None:
        """The key that stands in the file by now, if it is another one; a file that cannot be used changes nothing."""
        stamp = self._read_stamp()
        if self._key.path is None or stamp is None or stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            key = read_client_key(self._key.path)
        except ConfigError:
            return None
        is_same, self._key = key.model_dump() == self._key.model_dump(), key
        return None if is_same else key

    def _read_stamp(self) -> tuple[int, int, int] | None:
        if self._key.path is None:
            return None
        try:
            found = self._key.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


_Model = TypeVar("_Model", bound=_Part)


def _read(path: Path, model: type[_Model], bytes_max: int, what: str, *, is_secret: bool) -> _Model:
    data = _read_bytes(path, bytes_max, what, is_secret=is_secret)
    try:
        values = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        raise ConfigError(f"{path} is no {what}: it is not TOML; make a new one with `isles keys`") from None
    return _validate(model, values, f"{path} is no {what} that can be used")


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


def _validate(model: type[_Model], values: Any, where: str) -> _Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        text = fault["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}: {place}{' ' if place else ''}{text[:1].lower()}{text[1:]}") from None


# ------------------------------------------------------------------------------------------------------------- writing


def write_client_key(path: Path, key: ClientKey) -> None:
    """Writes the file of one process, whole or not at all, for its owner alone. Raises ConfigError."""
    head = f"# The key of {key.role} {key.name}: carry it to that process and show it to nobody."
    broker = ", ".join(f'"{public}"' for public in key.broker)
    lines = [head, f'name = "{key.name}"', f'role = "{key.role}"', *_pair_lines(key), f"broker = [{broker}]"]
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
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
