"""What does the outer step of a large fragment cost, beside moving its bytes?

    .venv/bin/python -P benchmarks/outer_step.py [--seed 1] [--values 50000000] [--contributions 8] [--short]

The measure is K copies of the fragment and three passes over it, in numpy: every merge of K deltas reads K of them, and
a step reads and writes parameters, momentum and remainder. Each row is done in turns with it, on one thread, and the
figure is the ratio of the thread's processor times; more is faster. Deltas are decoded already, and two are added at a
time, as the outer does; the version is then made in the memory that they had been decoded to.

    merge        K deltas added, by `mean` or by `rda`, and the outer gradient made of them
    outer step   momentum and step from the gradient; parameters and remainder once the update is decoded
    together     these two, as the product does them
    update       the step encoded for the learners, and decoded again, since what they decode is the official version
    digests      SHA-256 of the new parameters, and of momentum and remainder
    version      all of that

Ends with 0 if merge and outer step together reach the bar by either rule, else 1; update and digests are shown beside
them: the one is the codec's cost, the other that of SHA-256. --short only shows that everything works.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks`: nothing of it is installed

from benchmarks.measure.host import announce
from benchmarks.measure.ratios import Ratio, speed_ratio
from benchmarks.scale.synthetic import DELTA_SCALE, PARAMETER_SCALE, draw, make_manifest
from isles.outer.accumulators import l2_norm, start_merge
from isles.outer.feed import AT_ONCE_MAX
from isles.outer.optimizer import (
    FragmentState,
    NewVersion,
    advance,
    finish_version,
    optimizer_digest,
    parameters_digest,
    take_step,
)
from isles.proto.agreement import MergeRule, SyncSettings
from isles.proto.codec import decode, encode
from isles.proto.ids import ContributionId
from isles.proto.messages import Ingredient, Recipe

Vector = npt.NDArray[np.float32]

RATIO_MIN: Final = 0.25
NUM_PASSES: Final = 3
"""Over parameters, momentum and remainder."""
SHIFT_VALUES: Final = 4096
"""Deltas are windows of NUM_NOISES noises in turn, so far apart: they all differ, and take the memory of so many."""
NUM_NOISES: Final = AT_ONCE_MAX
"""So no two that are added at once share memory, and none finds the other in the cache."""
RULES: Final[tuple[MergeRule, ...]] = ("mean", "rda")
FRACTION: Final = 0.75


class Fragment:
    """One synthetic fragment: its state, the deltas of a round, and what the round's recipe says."""

    def __init__(self, num_values: int, num_contributions: int, seed: int) -> None:
        manifest = make_manifest(num_values, 1)
        self.slices = manifest.slices(0)
        self.num_values = manifest.num_values
        num_noise = self.num_values + SHIFT_VALUES * num_contributions
        noises = [draw((seed, 1, one), np.empty(num_noise, np.float32), DELTA_SCALE) for one in range(NUM_NOISES)]
        self.deltas: list[Vector] = [
            noises[number % NUM_NOISES][SHIFT_VALUES * number :][: self.num_values]
            for number in range(num_contributions)
        ]
        self.norms = [tuple(l2_norm(delta[one.start : one.stop]) for one in self.slices) for delta in self.deltas]
        self.state = FragmentState(
            draw((seed, 2), self._empty(), PARAMETER_SCALE),
            draw((seed, 3), self._empty(), DELTA_SCALE),
            draw((seed, 4), self._empty(), DELTA_SCALE / 10),
        )
        self._target = self._empty()
        self._spares = np.zeros((2, self.num_values), np.float32)

    def _empty(self) -> Vector:
        return np.empty(self.num_values, np.float32)

    def recipe(self, sync: SyncSettings) -> Recipe:
        """What the deltas are merged by; their weights differ."""
        ingredients = tuple(
            Ingredient(
                id=ContributionId(f"l{number:02}", 0, "ab" * 8, 1),
                digest="0" * 64,
                base_version=0,
                tokens=1,
                steps=1,
                weight=1.0 + number / 8,
                clip=1.0,
                norms=norms if sync.merge_rule == "rda" else (),
            )
            for number, norms in enumerate(self.norms)
        )
        return Recipe(
            ingredients=ingredients, fraction=FRACTION, merge_rule=sync.merge_rule, settings_digest=sync.digest
        )

    def copies_and_passes(self) -> None:
        """The measure."""
        for delta in self.deltas:
            np.copyto(self._target, delta)
        for _ in range(NUM_PASSES):
            np.multiply(self._target, np.float32(1.0), out=self._target)

    def merge(self, sync: SyncSettings) -> Vector:
        """The outer gradient."""
        merge = start_merge(self.recipe(sync), self.slices, sync)
        for start in range(0, len(self.deltas), AT_ONCE_MAX):
            merge.add(*self.deltas[start : start + AT_ONCE_MAX])
        return merge.result()

    def step(self, gradient: Vector, sync: SyncSettings) -> Vector:
        """How far the parameters shall move."""
        return take_step(self.state, gradient, self.recipe(sync), sync, self.slices, self._spares[0])[1]

    def advance(self, wanted: Vector) -> None:
        """Parameters and remainder, with an update that is there already.

        Both are written on, so they soon hold something else; that costs no more or less.
        """
        advance(self.state, wanted, self._spares[1])

    def together(self, sync: SyncSettings) -> None:
        """Merge and outer step."""
        self.advance(self.step(self.merge(sync), sync))

    def version(self, sync: SyncSettings) -> NewVersion:
        """Everything."""
        return finish_version(self.state, self.merge(sync), self.recipe(sync), sync, self.slices, tuple(self._spares))


def rows(fragment: Fragment) -> dict[str, Callable[[], object]]:
    """Name -> what is done."""
    syncs = {rule: SyncSettings(merge_rule=rule) for rule in RULES}
    sync = syncs["mean"]
    gradient, state = fragment.merge(sync), fragment.state
    wanted = fragment.step(gradient, sync).copy()
    update = encode(sync.codec_down, wanted)
    parts: dict[str, Callable[[], object]] = {}
    for rule, one in syncs.items():
        parts[f"merge, {rule}"] = partial(fragment.merge, one)
    parts["outer step: momentum and step"] = partial(fragment.step, gradient, sync)
    parts["outer step: parameters, remainder"] = partial(fragment.advance, wanted)
    for rule, one in syncs.items():
        parts[f"together, {rule}"] = partial(fragment.together, one)
    parts[f"update, encoded in {sync.codec_down}"] = partial(encode, sync.codec_down, wanted)
    parts["update, decoded"] = partial(decode, update, num_values=fragment.num_values)
    parts["digests, SHA-256"] = lambda: (parameters_digest(state.parameters), optimizer_digest(state))
    for rule, one in syncs.items():
        parts[f"version, {rule}"] = partial(fragment.version, one)
    return parts


def compare(arguments: argparse.Namespace) -> bool:
    """Prints the table; whether merge and outer step reach the bar by both rules."""
    fragment = Fragment(arguments.values, arguments.contributions, arguments.seed)
    print(
        f"a fragment of {fragment.num_values} values, {arguments.contributions} contributions, seed {arguments.seed}; "
        f"{arguments.pairs} pairs\n"
    )
    print(f"{'':<36}{'CPU s':>8}{'measure s':>11}  ratio: median (least-greatest)")
    ratios: dict[str, Ratio] = {}
    for name, call in rows(fragment).items():
        one = ratios[name] = speed_ratio(call, fragment.copies_and_passes, num_pairs=arguments.pairs)
        print(f"{name:<36}{one.seconds:>8.3f}{one.reference_seconds:>11.3f}  {one}", flush=True)
    reached = [ratios[f"together, {rule}"].median >= RATIO_MIN for rule in RULES]
    print(f"\nbar for merge and outer step together: {RATIO_MIN}; " + ", ".join(map(_verdict, RULES, reached)))
    return all(reached)


def _verdict(rule: str, is_reached: bool) -> str:
    return f"{rule}: {'reached' if is_reached else 'missed'}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of all synthetic values")
    parser.add_argument("--values", type=int, default=50_000_000, help="parameters of the fragment")
    parser.add_argument("--contributions", type=int, default=8, help="deltas that are merged")
    parser.add_argument("--pairs", type=int, default=5, help="times that each row is done, in turns with the measure")
    parser.add_argument("--short", action="store_true", help="a small fragment: only shows that this works")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.values, arguments.pairs = 1_000_000, 2
    return arguments


def main() -> int:
    arguments = parse()
    announce()
    is_reached = compare(arguments)
    return 0 if is_reached or arguments.short else 1


if __name__ == "__main__":
    sys.exit(main())
