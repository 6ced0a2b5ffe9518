"""What `isles up` shows while a run is under way.

On a terminal a display that is redrawn in place; elsewhere a line now and then; with `--json` nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from isles.ops.concerns import SHOWN_MAX, concern_lines
from isles.ops.fault_view import FaultShown, FaultsShown
from isles.ops.log_watch import Warned
from isles.ops.summary import bits_down, bits_up, last_loss, losses
from isles.ops.supervision import Child
from isles.ops.wording import amount, bytes_text, counted, loss_unit, percent, rate, seconds_text, sparkline
from isles.proto.agreement import Budget
from isles.proto.messages import LearnerInfo, RelayInfo, ReportInfo, Status
from isles.workers.task import BUILT_IN

REDRAW_SECONDS: Final = 0.25
LINE_SECONDS: Final = 10.0
"""Between two lines where nobody watches."""
EVENTS_SHOWN: Final = 5
EVENTS_KEPT: Final = 256
"""More than can happen between two looks, also when all processes of a large run die at once."""
BAR_WIDTH: Final = 24
SPARK_WIDTH: Final = 24
STALE_SECONDS: Final = 5.0
"""Without an answer of the broker for this long the figures are shown as old."""
PROGRESS_TOLD: Final = 0.02
"""A share of the run that must have passed before its pace means anything."""
REGION_COLOURS: Final = ("cyan", "magenta", "yellow", "green", "blue", "red")


@dataclass
class View:
    """Everything there is to show; the shell keeps it up to date."""

    run_dir: Path
    budget: Budget
    children: Mapping[str, Child]
    regions: Mapping[str, str]
    """Worker or relay -> region."""
    started_at: float
    task: str = BUILT_IN
    status: Status | None = None
    status_at: float | None = None
    unix: float = 0.0
    """The time on everybody's clock, for `last seen`."""
    reports: Sequence[ReportInfo] = ()
    restarts_before: int = 0
    phase: str = "starting"
    progress_at_start: tuple[float, float] | None = None
    """The first progress that was seen after this start, and when: what is left is estimated from there."""
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))

    warned: Warned | None = None
    """The last warning or error in a child's log."""
    warned_at: float = 0.0
    num_warned: int = 0
    faults: FaultsShown | None = None
    """What is done to the run on purpose, if anything is."""

    def warn(self, now: float, warned: Warned) -> None:
        """Remembers what a child complained about."""
        self.warned, self.warned_at = warned, now
        self.num_warned += 1

    def note(self, now: float, text: str) -> None:
        """Remembers something that happened."""
        self.events.append((now - self.started_at, text))

    def seconds_left(self, now: float) -> float | None:
        """How long it takes at the pace since the start; None until that can be told."""
        if self.progress_at_start is None or self.status is None:
            return None
        first, at = self.progress_at_start
        gained, left = self.status.progress - first, 1.0 - self.status.progress
        return (now - at) * left / gained if gained >= PROGRESS_TOLD and left > 0 else None

    @property
    def num_restarts(self) -> int:
        return self.restarts_before + sum(child.num_restarts for child in self.children.values())


class Display(Protocol):
    """Shows a view."""

    def update(self, view: View, now: float) -> None:
        """Shows it if it is time to."""

    def close(self) -> None:
        """Leaves the screen."""


class SilentDisplay:
    """Shows nothing."""

    def update(self, view: View, now: float) -> None:
        return

    def close(self) -> None:
        return


class LineDisplay:
    """Prints a line now and then, and events as they come."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed_at: float | None = None
        self._last_event: tuple[float, str] | None = None
        self._num_warned = 0

    def update(self, view: View, now: float) -> None:
        for event in self._new_events(view):
            self._print(event[0], event[1])
        if self._printed_at is None or now - self._printed_at >= LINE_SECONDS:
            self._printed_at = now
            self._print(now - view.started_at, progress_line(view))
            if view.warned is not None and view.num_warned > self._num_warned:
                others = view.num_warned - self._num_warned - 1
                self._num_warned = view.num_warned
                self._print(view.warned_at - view.started_at, warning_line(view.warned, others))

    def _new_events(self, view: View) -> list[tuple[float, str]]:
        events = list(view.events)
        if self._last_event in events:
            events = events[events.index(self._last_event) + 1 :]
        self._last_event = view.events[-1] if view.events else None
        return events

    def _print(self, seconds: float, text: str) -> None:
        with suppress(OSError):  # a file on a full disk: the run matters more than the line
            self._console.print(f"{clock_text(seconds)}  {text}", soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        return


class LiveDisplay:
    """Redraws in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        self._drawn_at: float | None = None

    def update(self, view: View, now: float) -> None:
        if self._drawn_at is None or now - self._drawn_at >= REDRAW_SECONDS:
            self._drawn_at = now
            self._live.update(render(view, now), refresh=True)

    def close(self) -> None:
        self._live.stop()


def make_display(console: Console, *, is_silent: bool) -> Display:
    """The display that suits the place."""
    if is_silent:
        return SilentDisplay()
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)


# ------------------------------------------------------------------------------------------------------------- one line


def clock_text(seconds: float) -> str:
    """Minutes and seconds since the start."""
    return f"{int(seconds) // 60:3d}:{int(seconds) % 60:02d}"


def progress_line(view: View) -> str:
    """The state of a run in one line."""
    status = view.status
    if status is None or not status.run:
        return view.phase
    totals = status.totals
    live = sum(learner.is_live for learner in status.learners)
    parts = [
        f"{percent(status.progress)}",
        f"{amount(totals.tokens_merged)} tokens",
        f"{counted(totals.rounds_committed, 'round')} of {totals.participation_mean:.1f}",
        f"loss {_loss_text(view)}",
        f"{bits_up(status):.2f} bits up, {bits_down(status):.2f} down",
        f"{counted(live, 'learner')} live",
    ]
    if status.relays:
        parts.append(f"{counted(sum(relay.is_live for relay in status.relays), 'relay')} linked")
    if view.num_restarts:
        parts.append(counted(view.num_restarts, "restart"))
    if concerns := concern_lines(status):
        parts.append(f"{counted(len(concerns), 'warning')}: {', '.join(line.partition(':')[0] for line in concerns)}")
    return ", ".join(parts if view.phase == "training" else [view.phase, *parts])


def warning_line(warned: Warned, num_others: int) -> str:
    """A complaint of a child in one line; `num_others` were logged besides it."""
    more = f" ({num_others} more in the logs)" if num_others else ""
    return f"{warned.level} of {warned.child}: {warned.text}{more}"


def _loss_text(view: View) -> str:
    values = losses(view.reports)
    if not values:
        return "not yet known"
    last = last_loss(view.reports)
    return f"{values[0].value:.3f} -> {last:.3f}" if len(values) > 1 else f"{values[0].value:.3f}"


# ----------------------------------------------------------------------------------------------------------- the screen


def render(view: View, now: float) -> RenderableType:
    """The whole screen."""
    parts: list[RenderableType] = [_title(view, now), Text()]
    if view.status is not None and view.status.run:
        parts += [_figures(view, view.status), Text()]
    parts += [_process_table(view, now)]
    if view.faults is not None:
        parts.append(_faults(view.faults, now))
    if view.status is not None:
        parts += [_concern(line) for line in concern_lines(view.status, num_max=SHOWN_MAX)]
    if view.warned is not None:
        parts.append(_warning(view, view.warned, now))
    for seconds, text in list(view.events)[-EVENTS_SHOWN:]:
        parts.append(Text.assemble((f"{clock_text(seconds)}  ", "dim"), text))
    return Group(*parts)


def _faults(faults: FaultsShown, now: float) -> Text:
    """What happens to the run on purpose, in one line for each fault that lasts."""
    if faults.lasting:
        lines = [f"{fault.text} ({_seconds_left(fault, now)} left)" for fault in faults.lasting]
        return Text("\n".join(lines), style="bold yellow", no_wrap=True, overflow="ellipsis")
    so_far = f"{faults.num_begun} of {counted(faults.num_faults, 'fault')} so far"
    if faults.is_over:
        so_far = f"{counted(faults.num_faults, 'fault')}, all over"
    elif faults.next_at is not None:
        so_far += f", the next in {max(0.0, faults.next_at - now):.0f} s"
    elif not faults.num_begun:
        so_far = f"{counted(faults.num_faults, 'fault')} to come, once the first round is committed"
    return Text(so_far, style="dim")


def _is_hit(child: Child, fault: FaultShown) -> bool:
    return fault.started_before is None or child.started_at < fault.started_before


def _seconds_left(fault: FaultShown, now: float) -> str:
    return f"{max(0.0, fault.ends_at - now):.0f} s"


def _warning(view: View, warned: Warned, now: float) -> Text:
    """The last complaint in one line of whatever width there is."""
    text = Text.assemble((f"{clock_text(view.warned_at - view.started_at)}  ", "dim"))
    is_new = now - view.warned_at < STALE_SECONDS
    style = "red" if warned.level != "warning" else "yellow"
    text.append(warning_line(warned, view.num_warned - 1), style=style if is_new else f"dim {style}")
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _concern(line: str) -> Text:
    """What the broker warns of, in one line of whatever width there is."""
    return Text(line, style="yellow", no_wrap=True, overflow="ellipsis")


def _title(view: View, now: float) -> Text:
    name = view.status.run if view.status is not None and view.status.run else view.run_dir.name
    title = Text.assemble(("isles ", "bold cyan"), (name, "bold"), ("  ", ""), (view.phase, "green"))
    title.append(f"  {seconds_text(now - view.started_at)}", style="dim")
    left = view.seconds_left(now) if view.phase == "training" else None
    if left is not None:
        title.append(f", {seconds_text(left)} left", style="dim")
    title.append(f"  {view.run_dir}", style="dim")
    if view.status_at is not None and now - view.status_at > STALE_SECONDS:
        title.append(f"  the broker has not answered for {seconds_text(now - view.status_at)}", style="yellow")
    title.no_wrap = True
    return title


def _figures(view: View, status: Status) -> RenderableType:
    totals = status.totals
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=6)
    grid.add_column(no_wrap=True)
    if view.budget.tokens:
        done = f"{amount(totals.tokens_merged)} of {amount(view.budget.tokens)}"
    else:
        budget = counted(view.budget.rounds or 0, "round")
        done = f"{amount(totals.tokens_merged)} in {totals.rounds_committed} of {budget}"
    speed = sum(learner.tokens_per_second for learner in status.learners if learner.is_live)
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        ProgressBar(total=1.0, completed=status.progress, width=BAR_WIDTH),
        Text(percent(status.progress), style="bold"),
        Text(f"{done}, {rate(speed)}/s"),
    )
    grid.add_row("tokens", bar)
    grid.add_row("loss", _loss(view))
    live = sum(learner.is_live for learner in status.learners)
    grid.add_row(
        "rounds",
        f"{totals.rounds_committed} committed, {totals.participation_mean:.1f} participants of {live} live, "
        f"fraction {totals.fraction_mean:.2f}, staleness {totals.staleness_mean:.2f}",
    )
    pending = sum(status.num_pending.values())
    grid.add_row(
        "work", f"{totals.merged} merged, {pending} pending, {totals.expired} expired, {totals.rejected} rejected"
    )
    grid.add_row(
        "wire",
        f"{bits_up(status):.2f} bits up and {bits_down(status):.2f} down per parameter, "
        f"{bytes_text(totals.bytes_up)} up, {bytes_text(totals.bytes_down)} down",
    )
    return grid


def _loss(view: View) -> Text:
    values = losses(view.reports)
    if not values:
        return Text("not yet known", style="dim")
    text = Text.assemble(f"{values[0].value:.3f}")
    if len(values) > 1:
        text.append(" → ", style="dim")
        text.append(f"{last_loss(view.reports):.3f}", style="bold green")
        text.append(f"{loss_unit(view.task)}  ", style="dim")
        text.append(sparkline([report.value for report in values], SPARK_WIDTH), style="cyan")
    return text


def _process_table(view: View, now: float) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for name in ("process", "region", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("steps", "tokens/s", "s/step", "last seen", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    known = {learner.learner: learner for learner in view.status.learners} if view.status is not None else {}
    relays = {relay.relay: relay for relay in view.status.relays} if view.status is not None else {}
    order = list(dict.fromkeys(view.regions.values()))
    lasting = view.faults.lasting if view.faults is not None else ()
    hit = {name: fault for fault in lasting for name in fault.processes}
    for child in view.children.values():
        region = view.regions.get(child.name, "")
        learner = known.get(child.name) if child.role == "worker" else None
        colour = REGION_COLOURS[order.index(region) % len(REGION_COLOURS)] if region in order else ""
        restarts = f"[yellow]{child.num_restarts}[/]" if child.num_restarts else "[dim]0[/]"
        relay = relays.get(child.name) if child.role == "relay" else None
        state = child_state(child, learner, now, view.unix, relay)
        if child.is_running and child.name in hit and _is_hit(child, hit[child.name]):
            state = f"[bold yellow]{hit[child.name].state}, {_seconds_left(hit[child.name], now)}[/]"
        table.add_row(
            child.name, f"[{colour}]{region}[/]" if colour else region, state,
            *_learner_cells(learner, relay, view.unix), restarts,
        )  # fmt: skip
    return table


def _learner_cells(learner: LearnerInfo | None, relay: RelayInfo | None, unix: float) -> tuple[str, str, str, str]:
    heard = learner or relay
    if heard is None:
        return ("", "", "", "")
    age = max(0.0, unix - heard.last_seen_unix)
    seen = f"{seconds_text(age)} ago"
    seen = seen if age < STALE_SECONDS else f"[yellow]{seen}[/]"
    if learner is None:
        return ("", "", "", seen)
    return (amount(learner.steps), rate(learner.tokens_per_second), f"{learner.step_seconds:.3g}", seen)


def child_state(
    child: Child, learner: LearnerInfo | None, now: float, unix: float, relay: RelayInfo | None = None
) -> str:
    """What a process is doing, with colour marks; `now` and `unix` are the same moment on two clocks."""
    if child.restart_at is not None:
        return f"[red]starts again in {max(0.0, child.restart_at - now):.0f} s[/]"
    if not child.is_running:
        return "[dim]finished[/]" if child.last_code == 0 else "[dim]stopped[/]"
    if child.killed_at is not None:
        return "[yellow]draining[/]" if child.role == "worker" else "[yellow]stopping[/]"
    if child.role == "relay":
        return _relay_state(child, relay, now, unix)
    if child.role != "worker":
        return "[green]running[/]"
    # A learner stays live for a while after its process died: what counts is whether this one has been heard.
    is_heard = learner is not None and learner.is_live and learner.last_seen_unix >= unix - (now - child.started_at)
    return "[green]training[/]" if is_heard else "[yellow]joining[/]"


def _relay_state(child: Child, relay: RelayInfo | None, now: float, unix: float) -> str:
    """Whether the broker hears a relay, and how many contributions wait there."""
    waiting = f", {amount(relay.facts.num_waiting)} waiting" if relay is not None and relay.facts.num_waiting else ""
    is_heard = relay is not None and relay.is_live and relay.last_seen_unix >= unix - (now - child.started_at)
    return f"[green]linked{waiting}[/]" if is_heard else f"[yellow]no link{waiting}[/]"
