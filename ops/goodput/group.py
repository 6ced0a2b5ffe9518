"""The chips of one group in the discrete-event world: they fail and return, and the group forms anew. Pure.

A group that is not elastic stands still for a restart, which mends whatever fails meanwhile. An elastic one stands
still for a shorter time and goes on without the chips that are away; one that is back waits until the group stands
still anyway, or until its patience ends and the group stands still for it. Whatever fails or returns while the group
forms is left out or taken along in the same pause.
"""

from __future__ import annotations

from collections.abc import Callable

from isles.ops.goodput.scenario import Scenario
from isles.ops.simulation.timeline import Timeline


class Group:
    """One group; `stand_still` and `go_on` are told when it stops and when it trains again."""

    def __init__(
        self,
        scenario: Scenario,
        timeline: Timeline,
        *,
        is_elastic: bool,
        stand_still: Callable[[], None],
        go_on: Callable[[], None],
    ) -> None:
        self.num_away = 0
        """Chips that failed and that the group is without."""
        self._scenario = scenario
        self._timeline = timeline
        self._is_elastic = is_elastic
        self._stand_still = stand_still
        self._go_on = go_on
        self._is_forming = False
        self._num_waiting = 0
        """Of those away, the ones that are back and wait to be taken in."""
        self._num_formed = 0

    def fail(self) -> None:
        """One of its chips fails."""
        self.num_away += 1
        if not self._is_forming:
            self._form(self._scenario.scale_down_seconds if self._is_elastic else self._scenario.restart_seconds)

    def take_back(self) -> None:
        """A chip of it is back."""
        if self._is_forming or not self._is_elastic:
            self.num_away -= 1
            return
        self._num_waiting += 1
        if self._num_waiting == 1:
            until = self._timeline.now + self._scenario.return_wait_seconds
            self._timeline.plan(until, self._lose_patience, self._num_formed)

    def _lose_patience(self, num_formed: int) -> None:
        if num_formed == self._num_formed:
            self._form(self._scenario.scale_up_seconds)

    def _form(self, seconds: float) -> None:
        self._is_forming = True
        self._num_formed += 1
        self._stand_still()
        self.num_away -= self._num_waiting
        self._num_waiting = 0
        self._timeline.plan(self._timeline.now + seconds, self._formed)

    def _formed(self) -> None:
        self._is_forming = False
        self._go_on()
