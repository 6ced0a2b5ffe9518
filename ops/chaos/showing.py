"""A campaign in words, and as a display shows it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from isles.ops.chaos.campaign import Campaign, Injection
from isles.ops.chaos.plan import MOMENTARY_KINDS, WIDE_KINDS, Kind, Plan
from isles.ops.fault_view import FaultShown, FaultsShown
from isles.ops.wording import counted, seconds_text

TARGETS_SHOWN: Final = 4
"""Names in one sentence: more of them are counted."""
STATES: Final[dict[Kind, str]] = {
    "freeze": "frozen",
    "delay": "delayed",
    "rate": "throttled",
    "blackhole": "cut off",
    "refuse": "refused",
    "cut": "cut off",
    "disk-full": "disk full",
}
"""What a process is while a fault of the kind lasts."""


def shown(campaign: Campaign) -> FaultsShown:
    """What a display is told."""
    num_faults = len(campaign.plan.fault)
    return FaultsShown(
        num_faults=num_faults,
        num_begun=len(campaign.injections),
        next_at=campaign.next_at,
        lasting=tuple(_lasting(injection, num_faults) for injection in campaign.lasting),
        is_over=campaign.is_finished,
    )


def _lasting(injection: Injection, num_faults: int) -> FaultShown:
    kind = injection.fault.kind
    whom = ("broker",) if kind == "disk-full" else injection.targets
    text = f"{numbered(injection, num_faults)}: {_what(injection)}"
    started_before = injection.began_at if kind == "freeze" else None  # links and disks outlast processes
    return FaultShown(text, injection.ends_at, frozenset(whom), STATES.get(kind, kind), started_before)


def begun(plan: Plan) -> str:
    """Said when the time of a plan begins."""
    if not plan.fault:
        return "the plan has no faults"
    return f"the time of the plan begins: {counted(len(plan.fault), 'fault')} within {seconds_text(plan.ends_at)}"


def over(plan: Plan) -> str:
    """Said when nothing is left to happen or to end."""
    return f"the faults are over, {len(plan.fault)} in all"


def happened(injection: Injection, num_faults: int, detail: str = "") -> str:
    """Said when a fault happens, or is left out; `detail` is what else is known of it."""
    if injection.failure:
        return f"{numbered(injection, num_faults)} is left out: {_what(injection)}: {injection.failure}"
    kind = injection.fault.kind
    lasting = "" if kind in MOMENTARY_KINDS else f" for {injection.fault.seconds:g} s"
    more = f" ({detail})" if detail else ""
    return f"{numbered(injection, num_faults)}: {_what(injection)}{lasting}{more}"


def numbered(injection: Injection, num_faults: int) -> str:
    """`fault 3 of 12`."""
    return f"fault {injection.number} of {num_faults}"


def _what(injection: Injection) -> str:
    fault = injection.fault
    if fault.kind in WIDE_KINDS:
        return fault.kind
    whom = fault.region or names(injection.targets) or fault.process or fault.role or "anybody"
    return f"{fault.kind} {whom}"


def names(targets: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    more = len(targets) - TARGETS_SHOWN
    return ", ".join(targets[:TARGETS_SHOWN]) + (f" and {more} more" if more > 0 else "")
