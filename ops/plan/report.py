"""What a run takes, as tables and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from isles.ops.plan.arithmetic import Load, Needs, egress_dollars, loads, needs, others, processes, value_bits
from isles.ops.plan.settings import PUBLISHED_GBIT, PUBLISHED_PARAMETERS, PlanSettings
from isles.ops.wording import amount, bytes_text, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def as_json(settings: PlanSettings) -> str:
    """Everything as one object."""
    ours, needed = loads(settings), needs(settings)
    up, down = value_bits(settings)
    plain = {
        "settings": settings.model_dump(mode="json"),
        "bits_up": up,
        "bits_down": down,
        "links": [_load(load, settings) for load in ours],
        "others": [_load(load, settings) for load in others(settings)],
        "needs": {
            "interval_steps": needed.interval_steps,
            "num_fragments": needed.num_fragments,
            "fragment_seconds": round(needed.fragment_seconds, 6),
            "budget_seconds": needed.budget_seconds,
            "outer_cores": round(needed.outer_cores, 4),
        },
        "processes": [
            {
                "process": one.name,
                "count": one.count,
                "memory_bytes": round(one.memory_bytes),
                "disk_bytes": round(one.disk_bytes),
            }
            for one in processes(settings)
        ],
        "egress_dollars": round(egress_dollars(ours, settings), 2),
    }
    return json.dumps(plain, indent=2)


def _load(load: Load, settings: PlanSettings) -> dict[str, Any]:
    return {
        "link": load.link,
        "direction": load.direction,
        "gbit": round(load.gbit, 6),
        "capacity_gbit": load.capacity_gbit,
        "utilisation": round(load.utilisation, 6),
        "gigabytes": round(load.gigabytes(settings.days), 3),
        "num_links": load.num_links,
    }


def render(settings: PlanSettings) -> list[RenderableType]:
    """Everything as a person reads it."""
    from rich.text import Text

    up, down = value_bits(settings)
    head = (
        f"{amount(settings.parameters)} parameters at {settings.sites} sites, steps of {settings.step_seconds:g} s, "
        f"H = {settings.interval_steps}, P = {settings.num_fragments}; {settings.codec_up} up with {up:.3g} bits a "
        f"value, {settings.codec_down} down with {down:.3g}"
    )
    return [
        Text(head),
        _bandwidth_table(settings),
        *[Text(line) for line in sentences(settings, needs(settings))],
        _process_table(settings),
    ]


def _bandwidth_table(settings: PlanSettings) -> Table:
    table = _table(("link", ""), ("Gbit/s", "it carries", "filled", f"in {settings.days:g} days", "egress"))
    wanted, mean, published = others(settings)
    for load, paid in ((wanted, mean), (published, published)):
        _add(table, load, paid, settings)
    table.add_section()
    for load in loads(settings):
        _add(table, load, load, settings)
    return table


def _add(table: Table, load: Load, paid: Load, settings: PlanSettings) -> None:
    filled = f"{100 * load.utilisation:,.0f} %"
    if load.utilisation > settings.utilisation_max:
        filled = f"[red]{filled}[/]" if load.utilisation > 1 else f"[yellow]{filled}[/]"
    price = f"${amount(egress_dollars([paid], settings))}" if load.is_paid else ""
    table.add_row(
        load.link,
        load.direction,
        f"{load.gbit:.3g}",
        f"{load.capacity_gbit:g}",
        filled,
        bytes_text(paid.gigabytes(settings.days) * 1e9),
        price,
    )


def sentences(settings: PlanSettings, found: Needs) -> list[str]:
    """What it would take, and what was published."""
    lines = []
    if found.interval_steps <= settings.interval_steps:
        lines.append(
            f"H = {settings.interval_steps} keeps every link below {100 * settings.utilisation_max:.0f} %; "
            f"H = {found.interval_steps} would, too."
        )
    else:
        lines.append(
            f"H = {settings.interval_steps} is too short for these links: H = {found.interval_steps} keeps every one "
            f"below {100 * settings.utilisation_max:.0f} %."
        )
    trip = (
        f"A fragment is up and down again after {seconds_text(found.fragment_seconds)}; "
        f"tau = {settings.overlap_steps:g} steps are {seconds_text(found.budget_seconds)}"
    )
    if found.num_fragments is None:
        lines.append(f"{trip}, less than the round trip: no P is enough, raise tau.")
    elif found.num_fragments <= settings.num_fragments:
        lines.append(f"{trip}, for which P = {found.num_fragments} is enough.")
    else:
        lines.append(f"{trip}, for which it takes P = {found.num_fragments}.")
    lines.append(
        f"The outer needs {found.outer_cores:.2g} of the slow cores on which it was measured; a longer H needs less."
    )
    if settings.parameters == PUBLISHED_PARAMETERS and settings.sites == 8:
        lines.append(
            f"Published for this model and 8 sites: {PUBLISHED_GBIT[0]:g} against {PUBLISHED_GBIT[1]:g} Gbit/s."
        )
    return lines


def _process_table(settings: PlanSettings) -> Table:
    table = _table(("process",), ("how many", "memory", "disk"))
    table.add_column("of it", overflow="fold")
    for one in processes(settings):
        table.add_row(one.name, str(one.count), bytes_text(one.memory_bytes), bytes_text(one.disk_bytes), one.reason)
    return table


def _table(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
