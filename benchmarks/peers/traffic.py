"""Bytes that one learner sends and receives for each synchronisation of the whole model, read off its sockets."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.peers.plan import WIDTHS, num_parameters
from benchmarks.peers.processes import UnavailableError
from benchmarks.peers.systems import FLOWER, HIVEMIND, System, isles, plan_of, run, syncs_of_isles, torchft, window

SHARES_MAX: Final = {"torchft": 1 / 8, "hivemind": 1 / 2.5, "flwr": 1 / 16}
"""Share of each peer's bytes that isles may have."""
PACE_SECONDS: Final = {"1.06 M": 0.1, "9.46 M": 0.4}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one learner and one synchronisation of the whole model, in bytes of TCP payload."""

    sent: float
    received: float

    @property
    def both(self) -> float:
        return self.sent + self.received


def compare_traffic(arguments: argparse.Namespace, scratch: Path) -> bool:
    """Prints the table; whether the bars are reached by the last of our codecs against whatever could be measured."""
    print("\nBytes of one learner for one synchronisation of the whole model")
    print(f"2 learners, H = {arguments.interval}, mean of {arguments.syncs} synchronisations of both, TCP payload")
    print(f"{'parameters':<12}{'':<28}{'sent':>13}{'received':>13}{'both':>13}{'bits each':>11}   shares of peers")
    is_reached = True
    for size in arguments.sizes:
        peers: dict[str, Traffic] = {}
        for system in [] if arguments.short else [torchft("whole"), HIVEMIND, FLOWER]:
            head = f"{size if system.role == 'torchft' else '':<12}{system.name:<28}"
            try:
                peers[system.distribution] = found = measure(system, size, arguments, scratch)
                print(_line(head, found, size), flush=True)
            except UnavailableError as reason:
                print(f"{head} not measured: {reason}", flush=True)
        for codec in arguments.codecs:
            own = measure(isles(codec), size, arguments, scratch)
            shares = {name: own.both / peer.both for name, peer in peers.items()}
            text = ", ".join(f"{share:.3f} of {name}" for name, share in shares.items())
            head = f"{'':<12}{isles(codec).name:<28}"
            print(f"{_line(head, own, size)}   {text}", flush=True)
            is_reached_here = all(share <= SHARES_MAX[name] for name, share in shares.items())
            is_reached &= is_reached_here or codec != arguments.codecs[-1]
    print(f"bar: at most {', '.join(f'{share:.4g} of {name}' for name, share in SHARES_MAX.items())}")
    return is_reached


def measure(system: System, size: str, arguments: argparse.Namespace, scratch: Path) -> Traffic:
    """One run."""
    plan = plan_of(arguments, size, PACE_SECONDS[size], counts_bytes=True)
    name = system.name.replace("/", "-").replace(" ", "")
    records = run(system, plan, scratch / f"traffic-{WIDTHS[size]}-{name}")
    rate = 1.0 if system.distribution else syncs_of_isles(records, plan, arguments.warmup)
    ends = [(rows[0], rows[-1]) for rows in (window(rows, plan, arguments.warmup) for rows in records)]
    syncs = arguments.syncs * rate
    return Traffic(
        statistics.mean(last.sent - first.sent for first, last in ends) / syncs,
        statistics.mean(last.received - first.received for first, last in ends) / syncs,
    )


def _line(head: str, traffic: Traffic, size: str) -> str:
    bits = 8 * traffic.both / num_parameters(WIDTHS[size])
    return f"{head}{traffic.sent:>13,.0f}{traffic.received:>13,.0f}{traffic.both:>13,.0f}{bits:>11.2f}"
