"""`isles doctor`: looks from here at a broker, step by step, and says what is wrong and what to do about it."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from isles.ops.options import Patience
from isles.ops.reach import find_reach, key_option
from isles.proto.transport.address import DEFAULT_BROKER

if TYPE_CHECKING:
    from isles.ops.doctor_findings import Finding, Place
    from isles.ops.doctor_link import Measured
    from isles.proto.keys import ClientKey
    from isles.proto.transport.address import Address

EXIT_WRONG: Final = 1
"""Something is wrong; the lines say what."""
MEMORY_INFO: Final = Path("/proc/meminfo")
MEMORY_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
MEMORY_USED: Final = Path("/sys/fs/cgroup/memory.current")
"""Of a container; what is left of its limit counts, not what the machine has."""
COLOURS: Final = {"ok": "green", "warning": "yellow", "wrong": "bold red"}


def build(name: str) -> click.Command:
    """The command."""

    @click.command(name)
    @click.option("--broker", default=None, metavar="ADDRESS", help=f"Whom to examine.  [default: {DEFAULT_BROKER}]")
    @click.option(
        "--run-dir",
        default=None,
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Examine the broker of the `isles up` that is running in this folder.",
    )
    @click.option(
        "--timeout",
        default=5.0,
        type=Patience(),
        show_default=True,
        metavar="SECONDS",
        help="How long to wait for each single answer.",
    )
    @click.option("--json", "is_json", is_flag=True, help="Print one JSON object instead of a table.")
    def doctor(broker: str | None, key: Path | None, run_dir: Path | None, timeout: float, is_json: bool) -> int:
        """Examine the way from here to a broker.

        Resolves its name, connects to its three ports, authenticates, measures round trip, clock difference and
        bandwidth, compares versions, and looks at memory and disk here and at the broker's store. Each line is ok, a
        warning, or wrong, and then says what to do. What comes after something that is wrong may be left out.

        Ends with 0 if nothing is wrong, else with 1.
        """
        from isles.ops.doctor_findings import is_well
        from isles.proto.transport.address import Address

        reach = find_reach(broker, key, run_dir)
        findings, measured = examine(Address.parse(reach.address), _read_key(reach.key), timeout)
        if is_json:
            click.echo(json.dumps(as_json(reach.address, findings, measured), indent=2))
        else:
            _print(reach.address, findings)
        return 0 if is_well(findings) else EXIT_WRONG

    doctor.params.insert(1, key_option("Key file of this process; an operator's or an outer's measures most."))
    return doctor


def examine(address: Address, key: ClientKey | None, timeout_seconds: float) -> tuple[list[Finding], Measured | None]:
    """All findings in order, and what was measured if it came to that. Raises only for what is wrong with the key."""
    from isles.ops.doctor_findings import is_well, judge_broker, judge_name, judge_place, judge_ports
    from isles.ops.doctor_link import Link
    from isles.ops.doctor_ports import look_at_ports, resolve
    from isles.proto.transport.zmq_transport import ZmqClient

    place = look_here()
    resolved = resolve(address.host, timeout_seconds)
    findings = [judge_name(address.host, resolved)]
    if resolved.addresses:
        seen = look_at_ports(address, resolved.addresses, timeout_seconds)
        findings += judge_ports(seen, has_key=key is not None)
    if not is_well(findings):
        return [*findings, *judge_place(place, None)], None
    measured = Link(ZmqClient(address, key), timeout_seconds, key_role=key.role if key else None).measure()
    findings += judge_broker(measured, place, timeout_seconds)
    return [*findings, *judge_place(place, measured.status)], measured


def look_here() -> Place:
    """What this machine has, as far as it tells."""
    from importlib.metadata import version

    from isles.ops.doctor_findings import Place

    disk = None
    with suppress(OSError):
        disk = shutil.disk_usage(Path.cwd()).free
    return Place(version("isles"), _memory_free(), disk)


def _memory_free() -> int | None:
    free = _number_in(MEMORY_INFO, "MemAvailable:")
    if free is not None:
        free *= 1024
    else:
        with suppress(OSError, ValueError, AttributeError):
            free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    limit, used = _number_in(MEMORY_LIMIT), _number_in(MEMORY_USED)
    if limit is None or used is None:
        return free
    left = max(0, limit - used)
    return left if free is None else min(free, left)


def _number_in(path: Path, after: str = "") -> int | None:
    """The first number in a file of the system, or the one after a word; None without one."""
    try:
        words = path.read_text(encoding="ascii").split()
        return int(words[words.index(after) + 1 if after else 0])
    except (OSError, ValueError, IndexError):
        return None


def _read_key(path: Path | None) -> ClientKey | None:
    if path is None:
        return None
    from isles.proto.key_files import read_client_key

    return read_client_key(path)


def as_json(broker: str, findings: list[Finding], measured: Measured | None) -> dict[str, Any]:
    """Findings and measurements as plain values; times in seconds."""
    from isles.ops.doctor_findings import is_well

    measures = {
        "round_trip_seconds": None if measured is None else measured.round_trip,
        "clock_ahead_seconds": None if measured is None else measured.clock_ahead_seconds,
        "bytes_moved": 0 if measured is None else measured.bytes_moved,
        "bytes_per_second": None if measured is None else measured.bytes_per_second,
    }
    found = [asdict(finding) for finding in findings]
    return {"broker": broker, "is_well": is_well(findings), "findings": found, "measures": measures}


def _print(broker: str, findings: list[Finding]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from isles.ops.wording import counted, make_console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what was found, and what to do")
    for finding in findings:
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\n{finding.advice}", style="yellow")
        table.add_row(finding.check, Text(finding.verdict, style=COLOURS[finding.verdict]), text)
    num_wrong = sum(finding.verdict == "wrong" for finding in findings)
    num_warnings = sum(finding.verdict == "warning" for finding in findings)
    end = (
        "nothing is wrong"
        if not num_wrong
        else f"{counted(num_wrong, 'thing')} {'is' if num_wrong == 1 else 'are'} wrong"
    )
    console = make_console()
    console.print(Text(f"the broker at {broker}", style="bold"))
    console.print(table)
    console.print(Text(f"{end}, {counted(num_warnings, 'warning')}"))
