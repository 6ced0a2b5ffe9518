"""`isles keys`: who may talk to a broker. Makes, lists, changes and ends the keys of one key folder."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from isles.ops.wording import counted
from isles.proto.errors import UsageError
from isles.proto.key_files import ALLOW_LIST_FILE, BROKER_FILE
from isles.proto.keys import KEY_ROLES, RELAYED_ROLES, KeyRole

if TYPE_CHECKING:
    from isles.ops.key_folder import BrokerRotation, KeyFolder

DEFAULT_FOLDER: Final = "keys"
SHOWN: Final = 10
"""Characters of a public key in a table: 2^64 different beginnings."""
TEXT: Final = """Say who may talk to a broker.

A key folder holds the broker's own key, the list of everybody who is let in, and one file for each process, which is
all that this process needs. The broker reads the list again by itself: a key that is revoked ends at once, on
connections that stand, too.
"""
NEW_TEXT: Final = """Let a new key in, and write its file.

Makes the folder and the broker's own key on first use. Processes that do the same work may share one key. With
--relay the file also names the keys of the relays that its process may dial; each has a key already.
"""
ROTATE_TEXT: Final = """Give NAME another key; the earlier one is let in until `isles keys revoke NAME --old`.

The file of NAME is rewritten, and a process that uses this file changes over by itself within seconds. `broker` is the
broker's own key: it changes at the broker's next start, and the files here list the new one from this moment.
"""
ROTATE_SHORT: Final = "Give NAME, or the broker itself, another key."
REVOKE_TEXT: Final = """Let no key of NAME in any more, or with --old only its newest.

With `broker --old`, the files here list only the present key of the broker.
"""
START: Final[dict[KeyRole, str]] = {
    "worker": "isles worker --broker ADDRESS --key {path}",
    "outer": "isles outer --broker ADDRESS --key {path}",
    "relay": "isles broker --upstream ADDRESS --key {path} --region REGION",
    "operator": "isles status --broker ADDRESS --key {path}, and the same with any other command that asks a broker",
}


def build(name: str) -> click.Command:
    """The command."""
    group = click.Group(name, help=TEXT)
    from isles.ops.key_delivery import build as build_delivery

    for command in (
        _new_command(),
        _list_command(),
        _rotate_command(),
        _revoke_command(),
        build_delivery(_folder_option()),
    ):
        group.add_command(command)
    return group


def _folder_option() -> click.Option:
    return click.Option(
        ["--keys", "folder"],
        type=click.Path(path_type=Path),
        default=DEFAULT_FOLDER,
        show_default=True,
        metavar="DIR",
        help="The key folder.",
    )


def _name_argument() -> click.Argument:
    return click.Argument(["name"], metavar="NAME")


def _open(folder: Path) -> KeyFolder:
    from isles.ops.key_folder import KeyFolder

    return KeyFolder(folder)


# ----------------------------------------------------------------------------------------------------------------- new


def _new_command() -> click.Command:
    role = click.Option(
        ["--role"], type=click.Choice(KEY_ROLES), required=True, help="What its owner may be; evaluators are operators."
    )
    is_lenient = click.Option(
        ["--if-missing", "is_lenient"], is_flag=True, help="Make nothing if NAME has a key of this role already."
    )
    relays = click.Option(
        ["--relay", "relays"], multiple=True, metavar="NAME", help="A relay that its owner may dial; repeat it."
    )
    parameters = [_name_argument(), role, relays, is_lenient, _folder_option()]
    return click.Command("new", callback=_new, help=NEW_TEXT, params=parameters)


def _new(name: str, role: KeyRole, relays: tuple[str, ...], is_lenient: bool, folder: Path) -> int:
    keys = _open(folder)
    if relays and role not in RELAYED_ROLES:
        raise UsageError(f"--relay is for the roles {' and '.join(RELAYED_ROLES)}: who is {role} dials the broker")
    if is_lenient and keys.exists and keys.has_file(name):
        owned = keys.allowed().of(name)
        if owned and owned[0].role == role:
            click.echo(f"{name} has a key already: {folder / name}.key")
            if relays and keys.name_relays(name, relays):
                click.echo(f"wrote     {folder / name}.key  names {', '.join(relays)}, too: carry it over anew")
            return 0
    is_new = not keys.exists
    path = keys.add(name, role, _now(), relays=relays)
    if is_new:
        click.echo(f"made      {folder / BROKER_FILE}  the broker's own key; it stays with the broker")
    click.echo(f"wrote     {path}  the key of {role} {name}, readable by you alone")
    click.echo(f"let in    {folder / ALLOW_LIST_FILE}  {name} as {role}")
    if is_new:
        click.echo(f"next      start the broker with its keys: isles broker --keys {folder}")
    click.echo(f"next      carry {path} to where it is used, and nowhere else:")
    click.echo(f"          {START[role].format(path=path)}{' --relay ADDRESS' if relays else ''}")
    return 0


# ---------------------------------------------------------------------------------------------------------------- list


def _list_command() -> click.Command:
    is_json = click.Option(["--json", "is_json"], is_flag=True, help="Print one JSON object instead of a table.")
    return click.Command(
        "list", callback=_list, help="Show who is let in. Secrets are never shown.", params=[_folder_option(), is_json]
    )


def _list(folder: Path, is_json: bool) -> int:
    keys = _open(folder)
    found = as_json(keys)
    if is_json:
        click.echo(json.dumps(found, indent=2))
        return 0
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from isles.ops.wording import make_console

    table = Table("name", "role", "made", "public key", "file", box=box.SIMPLE_HEAD, pad_edge=False)
    for entry in found["keys"]:
        made = datetime.fromtimestamp(entry["made_unix"], UTC).strftime("%Y-%m-%d %H:%M") if entry["made_unix"] else ""
        state = ("here" if entry["has_file"] else "elsewhere") if entry["is_newest"] else "earlier key"
        table.add_row(entry["name"], entry["role"], made, Text(short(entry["public"])), state)
    console = make_console()
    let_in = f"{folder}: {counted(len(found['keys']), 'key')} let in; broker {short(found['broker'])}"
    console.print(let_in, markup=False, highlight=False)
    if found["keys"]:
        console.print(table)
    return 0


def short(public: str) -> str:
    """Enough of a public key to compare two of them by eye."""
    return f"{public[:SHOWN]}…"


def as_json(keys: KeyFolder) -> dict[str, Any]:
    """Everything that `isles keys list` shows, as plain values; nothing of it is secret."""
    allowed = keys.allowed()
    newest = {key.name: allowed.of(key.name)[-1] for key in allowed.keys}
    return {
        "folder": str(keys.path),
        "broker": keys.broker_public(),
        "keys": [
            {
                **key.model_dump(),
                "is_newest": newest[key.name] == key,
                "has_file": newest[key.name] == key and keys.has_file(key.name),
            }
            for key in sorted(allowed.keys, key=lambda key: (key.role, key.name, key.made_unix))
        ],
    }


# ------------------------------------------------------------------------------------------------------ rotate, revoke


def _rotate_command() -> click.Command:
    return click.Command(
        "rotate",
        callback=_rotate,
        help=ROTATE_TEXT,
        short_help=ROTATE_SHORT,
        params=[_name_argument(), _folder_option()],
    )


def _rotate(name: str, folder: Path) -> int:
    from isles.ops.key_folder import is_broker

    keys = _open(folder)
    if is_broker(name):
        _say_broker(keys.rotate_broker(_now()), folder)
        click.echo("next      carry these files to wherever a copy of one is used: with an older copy nobody gets in")
        click.echo("next      restart the broker: from then on it has this key")
        click.echo("          then `isles keys revoke broker --old`")
        return 0
    path = keys.rotate(name, _now())
    click.echo(f"wrote     {path}  another key of {name}; its earlier one is let in, too")
    if others := keys.files_with_relay(name):
        for other in others:
            click.echo(f"wrote     {other}  names it")
        click.echo("next      carry those files over first: with an older copy nobody gets in at this relay")
        click.echo(f"          then this one, and restart the relay; then `isles keys revoke {name} --old`")
        return 0
    click.echo(f"next      carry it to wherever {name} uses a copy; a running process reads it by itself")
    click.echo(f"          then `isles keys revoke {name} --old`")
    return 0


def _say_broker(rotation: BrokerRotation, folder: Path) -> None:
    click.echo(f"wrote     {folder / BROKER_FILE}  another key of the broker, for its next start")
    for path in rotation.rewritten:
        click.echo(f"wrote     {path}  knows it")
    if rotation.elsewhere:
        click.echo(
            f"missing   the files of {', '.join(rotation.elsewhere)} are not here: add this key to `broker` there"
        )
        click.echo(f"          {rotation.public}")


def _revoke_command() -> click.Command:
    is_old = click.Option(["--old", "is_old"], is_flag=True, help="Only what was there before the newest key.")
    return click.Command(
        "revoke", callback=_revoke, help=REVOKE_TEXT, params=[_name_argument(), is_old, _folder_option()]
    )


def _revoke(name: str, is_old: bool, folder: Path) -> int:
    from isles.ops.key_folder import is_broker

    keys = _open(folder)
    if is_broker(name):
        return _revoke_broker(keys, is_old=is_old)
    if is_old:
        count = keys.retire(name)
        text = f"revoked   {counted(count, 'earlier key')} of {name}: only the newest one is let in"
        click.echo(text if count else f"{name} has one key only")
        return 0
    count = keys.revoke(name)
    click.echo(f"revoked   {counted(count, 'key')} of {name}: a running broker ends its sessions within a second")
    click.echo(f"deleted   {folder / name}.key  if it was here")
    return 0


def _revoke_broker(keys: KeyFolder, *, is_old: bool) -> int:
    if not is_old:
        raise UsageError(
            "the broker's own key cannot be revoked, only changed: `isles keys rotate broker`, and after the broker's "
            "restart `isles keys revoke broker --old`"
        )
    rotation = keys.retire_broker()
    for path in rotation.rewritten:
        click.echo(f"wrote     {path}  knows only the broker's present key")
    if not rotation.rewritten:
        click.echo("every file here knows only the broker's present key")
    if rotation.elsewhere:
        names = ", ".join(rotation.elsewhere)
        click.echo(f"missing   the files of {names} are not here: leave only this key in `broker` there")
        click.echo(f"          {rotation.public}")
    return 0


def _now() -> int:
    return int(time.time())
