"""`isles keys deliver`: one call makes whatever is missing of a broker's keys and copies each to where it is used.

For compose and whoever else starts processes by a file: the same call again changes nothing, or brings what was changed
in the key folder meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from isles.ops.key_folder import FOLDER_MODE, KeyFolder
from isles.ops.options import Number
from isles.proto.errors import ConfigError
from isles.proto.key_files import client_file, read_client_key, write_client_key
from isles.proto.keys import KEY_ROLES, RELAYED_ROLES, ClientKey, KeyRole

UID_MAX: Final = 2**32 - 2
"""Of Linux; the next one means nobody."""
TEXT: Final = """Make what is missing, and copy each key to the folder of its process.

Each NAME=ROLE:DIR is a key and the folder that its process sees; without :DIR it stays in the key folder alone. What is
there already is left alone, so the same call may come before every start. NAME=ROLE@RELAY:DIR names the relay that the
process dials; RELAY is another NAME, with the role relay, and there may be several, each after an @.
"""
SHORT_TEXT: Final = "Make what is missing, and copy each key to its process."


@dataclass(frozen=True)
class Delivery:
    """One key, and the folder its file is copied to; None = it stays where it is made."""

    name: str
    role: KeyRole
    folder: Path | None = None
    relays: tuple[str, ...] = ()
    """Names of the relays that its process may dial."""


class DeliveryType(click.ParamType[Delivery]):
    """NAME=ROLE or NAME=ROLE:DIR, with @RELAY after the role."""

    name = "delivery"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Delivery:
        name, _, rest = value.partition("=")
        whose, _, folder = rest.partition(":")
        role, *relays = whose.split("@")
        known = next((one for one in KEY_ROLES if one == role), None)
        if known is None:
            self.fail(f"{value!r}: write NAME=ROLE or NAME=ROLE:DIR, with a role of {', '.join(KEY_ROLES)}", param, ctx)
        if relays and known not in RELAYED_ROLES:
            text = f"{value!r}: @RELAY is for {' and '.join(RELAYED_ROLES)}; who is {role} dials the broker"
            self.fail(text, param, ctx)
        return Delivery(name, known, Path(folder) if folder else None, tuple(relays))


def build(folder_option: click.Option) -> click.Command:
    """The command."""
    owner = click.Option(
        ["--owner"],
        type=Number(0, UID_MAX),
        default=None,
        metavar="UID",
        help="Give all files and folders to this user, which takes the rights of root.",
    )
    deliveries = click.Argument(
        ["deliveries"], nargs=-1, required=True, type=DeliveryType(), metavar="NAME=ROLE:DIR..."
    )
    return click.Command(
        "deliver", callback=_deliver, help=TEXT, short_help=SHORT_TEXT, params=[deliveries, folder_option, owner]
    )


def _deliver(deliveries: tuple[Delivery, ...], folder: Path, owner: int | None) -> int:
    for line in deliver(KeyFolder(folder), deliveries, int(time.time())):
        click.echo(line)
    if owner is not None:
        hand_over([folder, *(one.folder for one in deliveries if one.folder is not None)], owner)
    return 0


def deliver(keys: KeyFolder, deliveries: Sequence[Delivery], now_unix: int) -> list[str]:
    """Makes and copies; one line for each thing that was done. Raises ConfigError or UsageError."""
    done = [f"made      {keys.path}"] if keys.make(now_unix) else []
    for one in deliveries:
        made = client_file(keys.path, one.name)
        if not keys.has_file(one.name):
            if keys.allowed().of(one.name):
                keys.revoke(one.name)  # of a file that got lost nobody knows who has it
            keys.add(one.name, one.role, now_unix)
            done.append(f"let in    {one.name} as {one.role}")
        key = read_client_key(made)
        if key.role != one.role:
            raise ConfigError(f"{made} is a key with the role {key.role}, not {one.role}: choose another name")
    for one in deliveries:  # relays may stand behind those that name them
        if one.relays:
            keys.name_relays(one.name, one.relays)
        key = read_client_key(client_file(keys.path, one.name))
        if one.folder is not None and not _has(one.folder, key):
            _make_folder(one.folder)
            write_client_key(client_file(one.folder, one.name), key)
            done.append(f"wrote     {client_file(one.folder, one.name)}")
    return done


def hand_over(folders: Iterable[Path], owner: int) -> None:
    """Gives folders and what is in them to a user. Raises ConfigError where this process may not."""
    for folder in folders:
        for path in (folder, *folder.iterdir()):
            try:
                os.chown(path, owner, -1, follow_symlinks=False)
            except OSError as error:
                raise ConfigError(
                    f"{path} cannot be given to user {owner} ({error.strerror}): run this as root, or without --owner"
                ) from None


def _has(folder: Path, key: ClientKey) -> bool:
    try:
        return read_client_key(client_file(folder, key.name)).model_dump() == key.model_dump()
    except ConfigError:
        return False


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}): check its parent's owner") from None
