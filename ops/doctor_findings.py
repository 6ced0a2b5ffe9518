"""What the doctor makes of what was seen and measured: one line for each thing, with what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from isles.ops.concerns import concern_lines
from isles.ops.doctor_link import BLOB_BYTES_WANTED, Measured
from isles.ops.doctor_ports import PortSeen, Resolved
from isles.ops.wording import amount, bytes_text, counted, rate, seconds_text
from isles.proto.client import STALL_SECONDS
from isles.proto.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Channel, Limits, Status
from isles.proto.timeouts import HEARTBEAT_TIMEOUT_SECONDS

Verdict = Literal["ok", "warning", "wrong"]

CLOCK_SECONDS_MAX: Final = 2.0
"""Two clocks that differ by more show wrong ages; NTP keeps them within a tenth of it."""
CHUNK_SECONDS_WANTED: Final = STALL_SECONDS / 2
"""A chunk that takes longer is asked for again while it is still on its way, as soon as the link has a bad moment."""
JOIN_SECONDS: Final = 120.0
"""Default of worker.join_timeout_seconds, within which all parameters have to arrive."""
MEMORY_BYTES_PER_PARAMETER: Final = 24
"""Of a worker: parameters, gradient, two moments of Adam, anchor, and a copy that is being encoded, 4 bytes each."""
DISK_BYTES_PER_PARAMETER: Final = 32
"""Of a worker: two checkpoints, while one replaces the other, each with parameters, anchor and two moments."""
PARAMETER_BYTES: Final = 4
CHUNK_BYTES_MIN: Final = 4096
"""As small as broker.chunk_bytes may be."""

PORT_HINTS: Final = {
    "refused": "nobody listens there: is the broker running, is that its port, and does it listen on this address and "
    "not only on its own loopback (broker.bind)?",
    "unanswered": "a firewall drops the packets, or no machine has this address: open the three ports on the way, or "
    "correct the address",
    "unreachable": "there is no way to that address from here: check network, VPN or tunnel",
    "silent": "something that is no broker has the port, or a tunnel whose other end is gone: check what listens there",
    "foreign": "another program listens there: check the port; a broker's three ports are control, bulk and events",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line."""

    check: str
    verdict: Verdict
    text: str
    advice: str = ""
    """What to do; empty if nothing."""


@dataclass(frozen=True, slots=True)
class Place:
    """The machine on which the doctor runs; None = it does not tell."""

    version: str
    memory_free_bytes: int | None
    disk_free_bytes: int | None


def judge_name(host: str, resolved: Resolved) -> Finding:
    """Whether the host's name stands for anything."""
    if resolved.addresses:
        is_number = resolved.addresses == (host.strip("[]"),)
        return Finding("address", "ok", host if is_number else f"{host} is {', '.join(resolved.addresses)}")
    advice = "correct the name, or the resolver of this machine; the number of an address needs none"
    return Finding("address", "wrong", f"{host} cannot be resolved: {resolved.fault}", advice)


def judge_ports(seen: Sequence[PortSeen], *, has_key: bool) -> list[Finding]:
    """One finding for each port, and one for what the broker asks of keys."""
    found: list[Finding] = []
    for channel in Channel:
        finding = _judge_port(channel, [one for one in seen if one.channel is channel])
        is_said = any(finding.advice == earlier.advice for earlier in found)
        found.append(replace(finding, advice="") if is_said else finding)
    mechanisms = {one.mechanism for one in seen if one.state == "zeromq"}
    return [*found, *_judge_mechanisms(mechanisms, has_key=has_key)]


def _judge_port(channel: Channel, seen: Sequence[PortSeen]) -> Finding:
    check = f"port {channel}"
    good = [one for one in seen if one.state == "zeromq"]
    bad = [one for one in seen if one.state != "zeromq"]
    if not good:
        one = bad[0]
        text = f"{one.address}:{one.port} is {one.state}" + (f": {one.text}" if one.text else "")
        return Finding(check, "wrong", text, PORT_HINTS[one.state])
    one = good[0]
    text = f"{one.address}:{one.port} takes connections within {_short(one.seconds)} and speaks ZeroMQ"
    if not bad:
        return Finding(check, "ok", text)
    others = ", ".join(f"{other.address} is {other.state}" for other in bad)
    advice = "which address is dialled is up to the resolver: name the one that answers instead of the host"
    return Finding(check, "warning", f"{text}; {others}", advice)


def _judge_mechanisms(mechanisms: set[str], *, has_key: bool) -> list[Finding]:
    if not mechanisms:
        return []
    if mechanisms == {"CURVE"}:
        if has_key:
            return [Finding("key", "ok", "the broker asks for a key")]
        advice = "give --key FILE with a key that `isles keys new` made for you"
        return [Finding("key", "wrong", "the broker asks for a key and none was given", advice)]
    if mechanisms == {"NULL"}:
        if has_key:
            advice = "leave --key out, or start the broker with broker.keys"
            return [Finding("key", "wrong", "a key was given, but this broker has none and lets everybody in", advice)]
        return [Finding("key", "ok", "the broker has no keys: whoever reaches it can change the run")]
    names = ", ".join(sorted(name or "no name" for name in mechanisms))
    text = f"the ports ask for different things ({names}): they are not one broker's"
    return [Finding("key", "wrong", text, "check all three ports")]


def judge_answer(measured: Measured, timeout_seconds: float) -> list[Finding]:
    """Whether a broker answered and lets this process in."""
    if measured.status is None:
        if measured.refusal:
            return [Finding("answer", "wrong", measured.refusal)]
        text = f"ZeroMQ takes the connection, but no broker answered within {timeout_seconds:g} s"
        advice = "another program may use ZeroMQ there: check the port; or raise --timeout, if the broker is very busy"
        return [Finding("answer", "wrong", text, advice)]
    if measured.refusal:
        return [Finding("answer", "wrong", f"the broker answers, but will not have this process: {measured.refusal}")]
    status = measured.status
    live = sum(learner.is_live for learner in status.learners)
    learners = f"{live} of {counted(len(status.learners), 'learner')} live"
    what = f"run {status.run}, {learners}" if status.run else "no run yet: the first worker starts one"
    return [Finding("answer", "ok", f"{what}; the broker has been up for {seconds_text(status.uptime_seconds)}")]


def judge_versions(measured: Measured, own: str) -> list[Finding]:
    """Whether both ends are of one build and speak one protocol."""
    assert measured.status is not None
    theirs = measured.status.version
    protocol = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
    if measured.welcome is not None:
        protocol = f"{measured.welcome.protocol[0]}.{measured.welcome.protocol[1]}"
    if theirs == own:
        return [Finding("versions", "ok", f"isles {own} on both sides, protocol {protocol}")]
    text = f"isles {own} here, {theirs or 'an older one'} at the broker, protocol {protocol}"
    advice = "they understand each other; install the same isles on both, so that everything is there that you expect"
    return [Finding("versions", "warning", text, advice)]


def judge_round_trip(measured: Measured, limits: Limits) -> list[Finding]:
    """The time for a question and its answer against the times that the broker goes by."""
    seconds = measured.round_trip
    if seconds is None:
        return [Finding("round trip", "wrong", "the broker answered once and then no more", "look into its log")]
    text = f"{_short(seconds)}, the median of {counted(len(measured.round_trips), 'question')}"
    text += f", {_short(max(measured.round_trips))} at worst; a heartbeat every {limits.heartbeat_seconds:g} s"
    if seconds >= limits.learner_lease_seconds / 2:
        advice = f"raise broker.learner_lease_seconds, which is {limits.learner_lease_seconds:g}, or find a shorter way"
        return [Finding("round trip", "wrong", text, advice)]
    if seconds > limits.heartbeat_seconds:
        advice = "raise broker.heartbeat_seconds and the leases, or find what is slow: the way, or the broker's disk"
        return [Finding("round trip", "warning", text, advice)]
    if seconds > limits.outer_lease_seconds / 3:
        advice = "fine for a worker; an outer could lose its lease: run it near the broker, or raise "
        return [Finding("round trip", "warning", text, f"{advice}broker.outer_lease_seconds")]
    return [Finding("round trip", "ok", text)]


def judge_clock(measured: Measured) -> list[Finding]:
    """How far the two clocks are apart."""
    ahead = measured.clock_ahead_seconds
    if ahead is None:
        return [Finding("clock", "warning", "the broker does not tell its clock", "install the same isles on both")]
    uncertain = (measured.round_trip or 0.0) / 2
    side = "ahead of" if ahead >= 0 else "behind"
    text = f"the broker's is {_short(abs(ahead))} {side} this machine's, give or take {_short(uncertain)}"
    if abs(ahead) - uncertain <= CLOCK_SECONDS_MAX:
        return [Finding("clock", "ok", text)]
    advice = "set both by NTP; nothing is decided by them, but every age that you read is wrong by as much"
    return [Finding("clock", "warning", text, advice)]


def judge_bandwidth(measured: Measured, limits: Limits) -> list[Finding]:
    """What comes through per second, and whether a chunk fits through within the transport's patience."""
    per_second = measured.bytes_per_second
    if per_second is None:
        verdict: Verdict = "ok" if measured.welcome is None or not measured.welcome.heads else "wrong"
        return [Finding("bandwidth", verdict, f"not measured: {measured.fetch_fault or 'the broker let nobody in'}")]
    chunk_seconds = limits.chunk_bytes / per_second
    is_short = measured.bytes_moved < BLOB_BYTES_WANTED
    text = (
        f"{'at least ' if is_short else ''}{bytes_text(per_second)}/s to here ({bytes_text(measured.bytes_moved)} in "
        f"{_short(measured.seconds_moving)}); a chunk of {bytes_text(limits.chunk_bytes)} takes {_short(chunk_seconds)}"
    )
    fitting = max(CHUNK_BYTES_MIN, 1 << max(0, int(per_second * CHUNK_SECONDS_WANTED).bit_length() - 1))
    advice = f"lower broker.chunk_bytes to {fitting}, or find a faster way"
    if chunk_seconds > HEARTBEAT_TIMEOUT_SECONDS:
        text += f", and a connection is given up after {HEARTBEAT_TIMEOUT_SECONDS:g} s of silence"
        return [Finding("bandwidth", "wrong", text, advice)]
    if chunk_seconds > CHUNK_SECONDS_WANTED:
        return [Finding("bandwidth", "warning", text, advice)]
    return [Finding("bandwidth", "ok", text), *_judge_model(measured, per_second)]


def _judge_model(measured: Measured, per_second: float) -> list[Finding]:
    assert measured.status is not None
    num = measured.status.num_parameters
    seconds = num * PARAMETER_BYTES / per_second
    if not num or (measured.bytes_moved < BLOB_BYTES_WANTED and seconds <= JOIN_SECONDS):
        return []
    text = f"{amount(num)} parameters take {seconds_text(seconds)} to get here"
    if seconds <= JOIN_SECONDS:
        return [Finding("model", "ok", text)]
    advice = f"a worker gives up after {JOIN_SECONDS:g} s: raise worker.join_timeout_seconds here"
    return [Finding("model", "warning", text, advice)]


def judge_events(measured: Measured, timeout_seconds: float) -> list[Finding]:
    """Whether hints come through; without them everything takes seconds longer."""
    if measured.welcome is None:
        return []
    if measured.has_hint:
        return [Finding("events", "ok", "hints arrive")]
    advice = "the port is open but nothing comes out: is it the broker's third port, and is --timeout above "
    return [Finding("events", "wrong", f"no hint within {timeout_seconds:g} s", f"{advice}broker.beat_seconds?")]


def judge_place(place: Place, status: Status | None) -> list[Finding]:
    """Memory and disk of this machine against what a worker of the run takes."""
    num = 0 if status is None else status.num_parameters
    checks = (
        ("memory here", place.memory_free_bytes, num * MEMORY_BYTES_PER_PARAMETER, "a worker"),
        ("disk here", place.disk_free_bytes, num * DISK_BYTES_PER_PARAMETER, "what a worker keeps"),
    )
    found = []
    for check, free, needed, what in checks:
        if free is None:
            continue
        text = f"{bytes_text(free)} free"
        if needed:
            text += f"; {what} of {amount(num)} parameters takes some {bytes_text(needed)}"
        is_enough = free >= needed
        advice = "" if is_enough else "use a larger machine, or make room, before you start a worker here"
        found.append(Finding(check, "ok" if is_enough else "warning", text, advice))
    return found


def judge_store(status: Status) -> list[Finding]:
    """How full the broker's store is, as it says itself."""
    store = status.store
    if store is None:
        return []
    text = f"{bytes_text(store.stored_bytes)} stored, {bytes_text(store.disk_free_bytes)} free on the broker's disk"
    if store.disk_free_bytes < store.disk_free_bytes_min:
        advice = f"uploads wait below {bytes_text(store.disk_free_bytes_min)} (broker.disk_free_bytes_min): make room"
        return [Finding("store", "wrong", text, advice)]
    if store.stored_bytes_max is not None and store.stored_bytes >= store.stored_bytes_max:
        advice = f"uploads wait at {bytes_text(store.stored_bytes_max)} (broker.stored_bytes_max): raise it"
        return [Finding("store", "wrong", text, advice)]
    return [Finding("store", "ok", text)]


def judge_run(status: Status) -> list[Finding]:
    """What the broker itself warns of."""
    return [Finding("run", "warning", line) for line in concern_lines(status)]


def judge_broker(measured: Measured, place: Place, timeout_seconds: float) -> list[Finding]:
    """Everything that can be said once its ports are there."""
    found = judge_answer(measured, timeout_seconds)
    status = measured.status
    if status is None:
        return found
    limits = status.limits or Limits()
    found += [*judge_versions(measured, place.version), *judge_round_trip(measured, limits), *judge_clock(measured)]
    if not measured.refusal:
        found += [*judge_bandwidth(measured, limits), *judge_events(measured, timeout_seconds)]
    return [*found, *judge_store(status), *judge_run(status)]


def is_well(findings: Iterable[Finding]) -> bool:
    """Whether nothing is wrong; warnings may be."""
    return all(finding.verdict != "wrong" for finding in findings)


def _short(seconds: float) -> str:
    """A duration that may be tiny: `0.4 ms`, `12 ms`, `1.5 s`."""
    if seconds < 0.995:
        return f"{rate(seconds * 1000)} ms" if seconds * 1000 >= 100 else f"{seconds * 1000:.2g} ms"
    return seconds_text(seconds)
