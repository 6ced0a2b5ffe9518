"""Keys: who may talk to a broker, and how a process proves which key it has. Pure; `key_files.py` reads and writes.

A key is a pair of CURVE keys, each written as 40 characters of z85. The public half is a name for its owner; the
secret half never leaves its file. One folder, made by `isles keys`, holds what a broker needs:

    broker.key      the broker's own pair; readable by its owner alone
    allowed.toml    the allow-list: name, role and public key of everybody who is let in
    NAME.key        for the process NAME, and the only file it needs: its pair, and the public keys of its broker, and
                    of the relays through which it may talk to it

Every file is TOML. A file that is missing, damaged, too long or open to others is one clear sentence, never a guess.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from isles.proto.errors import ConfigError
from isles.proto.ids import Name

KEY_LENGTH: Final = 40
"""Characters of one key: z85 writes its 32 bytes as 8 groups of 5 characters."""
Z85_ALPHABET: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
"""Digits of z85 in order of their value; none of them needs an escape in TOML."""
BROKER_KEYS_MAX: Final = 4
"""Public keys of its broker that one client file lists: the present one and the next one, and room for a mistake."""
RELAY_KEYS_MAX: Final = 8
"""Public keys of relays that one client file lists: two relays of its region, each as its broker."""
ALLOWED_MAX: Final = 4096
"""Keys of one allow-list: as many as there may be learners."""
KeyRole = Literal["worker", "outer", "relay", "operator"]
"""What the owner of a key may be; an operator's key also serves an evaluator."""
KEY_ROLES: Final[tuple[KeyRole, ...]] = ("worker", "outer", "relay", "operator")
RELAYED_ROLES: Final[tuple[KeyRole, ...]] = ("worker", "operator")
"""Whose processes may dial a relay instead of the broker: workers, and with an operator's key an evaluator."""


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


def key_bytes(text: str) -> bytes:
    """The 32 bytes of a key for which `is_key` holds."""
    values = []
    for start in range(0, KEY_LENGTH, 5):
        value = 0
        for character in text[start : start + 5]:
            value = value * 85 + Z85_ALPHABET.index(character)
        values.append(value.to_bytes(4, "big"))
    return b"".join(values)


def _check_key(text: str) -> str:
    if not is_key(text):
        raise ValueError(f"is no key: a key is {KEY_LENGTH} characters of z85")
    return text


Z85Key = Annotated[str, AfterValidator(_check_key)]
"""One CURVE key as text."""


class Part(BaseModel):
    """What stands in a file of keys; a message about it never repeats a value, which may be a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class KeyPair(Part):
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
    relays: Annotated[tuple[Z85Key, ...], Field(max_length=RELAY_KEYS_MAX)] = ()
    """Public keys of the relays that this process may dial instead of its broker, tried in turn."""
    made_unix: Annotated[int, Field(ge=0)] = 0
    _path: str = PrivateAttr(default="")
    _is_for_relay: bool = PrivateAttr(default=False)

    @property
    def path(self) -> str:
        """The file it was read from; empty if it came from none."""
        return self._path

    @property
    def is_for_relay(self) -> bool:
        """Whether `broker` lists the keys of relays, since one of those is dialled in place of the broker."""
        return self._is_for_relay

    def for_relay(self) -> ClientKey:
        """This key as a relay is dialled with it. Raises ConfigError if it names no relay."""
        if not self.relays:
            raise ConfigError(
                f"the key of {self.role} {self.name} names no relay, so it opens none: where the broker runs, name its "
                f"relay with `isles keys new {self.name} --role {self.role} --relay RELAY --if-missing`, and carry the "
                "file over anew"
            )
        key = self.model_copy(update={"broker": self.relays})
        key._is_for_relay = True  # noqa: SLF001 - of the copy
        return key


class AllowedKey(Part):
    """One entry of the allow-list."""

    name: Name
    role: KeyRole
    public: Z85Key
    made_unix: Annotated[int, Field(ge=0)] = 0


class AllowList(Part):
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

    @cached_property
    def sha256(self) -> str:
        """Hexadecimal digest of who is let in as what, whatever the order: tells whether two lists say the same."""
        lines = sorted(f"{key.name} {key.role} {key.public}\n" for key in self.keys)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def of(self, name: str) -> tuple[AllowedKey, ...]:
        """All keys of one name, the oldest first."""
        return tuple(sorted((key for key in self.keys if key.name == name), key=lambda key: key.made_unix))

    def with_key(self, key: AllowedKey) -> AllowList:
        """This list and one more entry. Raises ConfigError if its name has another role, or it is there already."""
        return validated(AllowList, {"keys": (*self.keys, key)}, "the allow-list")

    def without(self, *keys: AllowedKey) -> AllowList:
        """This list less some entries."""
        return AllowList(keys=tuple(key for key in self.keys if key not in keys))

    def __iter__(self) -> Iterator[AllowedKey]:  # type: ignore[override]  # a list of keys is read as one
        return iter(self.keys)


_Model = TypeVar("_Model", bound=Part)


_FAULTS: Final = {"missing": "is missing", "extra_forbidden": "is no entry of such a file"}
"""What is wrong with an entry, by Pydantic's name for it, where its own words do not help."""


def validated(model: type[_Model], values: Any, where: str) -> _Model:
    """A part of the files of keys. Raises ConfigError, which says `where` and never repeats a value."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        text = _FAULTS.get(fault["type"], fault["msg"].removeprefix("Value error, "))
        raise ConfigError(f"{where}: {place}{' ' if place else ''}{text[:1].lower()}{text[1:]}") from None
