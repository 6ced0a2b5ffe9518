"""What does a codec cost: bits, error, and time?

    .venv/bin/python -P benchmarks/codec.py [--seed 1] [--values 67108864] [--pairs 5] [--only step] [--short]

Gaussian values of one deviation, as the deltas of a fragment are within a block. For each codec:

    entropy   order-0 entropy of the levels, in bits a value; what no code of single levels can beat
    bits      size of the whole payload in bits a value, scales, header and checksums included; its ratio to the entropy
    error     root of the mean square of what one contribution leaves to the next, in standard deviations
    encode    the account anchor - theta computed, quantised, packed and compressed, as a learner does it
    decode    decompressed, unpacked, and added to the merge of a round by `mean`, as the outer does it

Bits are those of 2^20 values, the smallest fragment that the bar is for, and of all. Speeds are ratios of the thread's
processor time to that of a numpy copy of as many singles, done in turns; more is faster. The copy goes to memory that
is there already.

Ends with 0 if every step codec takes at most 1.04 of its entropy and reaches both speeds, else 1; --short only shows
that everything works.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks`: nothing of it is installed

from benchmarks.measure.host import announce
from benchmarks.measure.ratios import Ratio, speed_ratio
from isles.outer.accumulators import start_merge
from isles.outer.workshop import Adder
from isles.proto.agreement import SyncSettings
from isles.proto.codec import BLOCK_VALUES, CODEC_NAMES, decode, decode_with_scales, encode
from isles.proto.codec.table import STEP_BLOCK_VALUES, BlockCodec, StepCodec, codec_named
from isles.proto.codec.torch_codec import encode_with_stats
from isles.proto.ids import ContributionId
from isles.proto.manifest import TensorSlice
from isles.proto.messages import Ingredient, Recipe
from isles.workers.account import Account
from isles.workers.encoding import contribution_in

Vector = npt.NDArray[np.float32]

STEPS: Final = ("step0.5", "step0.75", "step1", "step1.25", "step1.5", "step1.75", "step2", "step2.25", "step2.5")
FEW_VALUES: Final = 1 << 20
BITS_OVER_ENTROPY_MAX: Final = 1.04
ENCODE_RATIO_MIN: Final = 0.08
DECODE_RATIO_MIN: Final = 0.10
PARAMETER_SCALE: Final = 20.0
"""Parameters beside a delta of one deviation."""


class Row(NamedTuple):
    """What one codec costs."""

    name: str
    entropy: float | None
    """None where values are not cut to levels."""
    bits_of_few: float
    bits: float
    error: float
    encode: Ratio
    decode: Ratio

    @property
    def over_entropy(self) -> float:
        """The larger of both ratios of bits to entropy; infinite without one."""
        return max(self.bits_of_few, self.bits) / self.entropy if self.entropy else float("inf")

    @property
    def reaches_bars(self) -> bool:
        """Whether a step codec keeps what it promises; of the others nothing is asked."""
        if self.name in CODEC_NAMES:
            return True
        return (
            self.over_entropy <= BITS_OVER_ENTROPY_MAX
            and self.encode.median >= ENCODE_RATIO_MIN
            and self.decode.median >= DECODE_RATIO_MIN
        )


class Fragment:
    """A learner's fragment: the last version, where training has brought it, and memory for the account."""

    def __init__(self, num_values: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.theta = random.standard_normal(num_values, np.float32)
        self.theta *= np.float32(PARAMETER_SCALE)
        anchor = random.standard_normal(num_values, np.float32)
        anchor += self.theta
        self.account = Account(torch.from_numpy(anchor))
        self.delta = self.account.contribution(torch.from_numpy(self.theta)).numpy()
        self.buffer, self.target = np.zeros((2, num_values), np.float32)
        self.slices = (TensorSlice("weight", 0, num_values, (num_values,)),)

    def copy(self) -> None:
        """The measure."""
        np.copyto(self.target, self.delta)

    def copy_anew(self) -> None:
        """The same with memory of its own, which costs about twice as much."""
        self.delta.copy()

    def encode(self, name: str) -> bytes:
        """What a learner sends."""
        unmerged = contribution_in(torch.from_numpy(self.buffer), self.account, torch.from_numpy(self.theta))
        return encode_with_stats(name, unmerged).payload

    def measure(self, name: str, num_pairs: int) -> Row:
        """Everything about one codec."""
        few = self.delta[:FEW_VALUES]
        payload, payload_of_few = self.encode(name), encode(name, few)
        merge = Merge(self.slices, num_pairs + 1)
        return Row(
            name,
            entropy_bits(name, payload_of_few, few.size),
            8 * len(payload_of_few) / few.size,
            8 * len(payload) / self.delta.size,
            relative_error(few, decode(payload_of_few, num_values=few.size)),
            speed_ratio(partial(self.encode, name), self.copy, num_pairs=num_pairs),
            speed_ratio(partial(merge.add, payload), self.copy, num_pairs=num_pairs),
        )


class Merge:
    """A merge by `mean` of so many contributions."""

    def __init__(self, slices: tuple[TensorSlice, ...], num_contributions: int) -> None:
        sync = SyncSettings(merge_rule="mean")
        ingredients = tuple(
            Ingredient(
                id=ContributionId(f"l{number:02}", 0, "ab" * 8, 1),
                digest="0" * 64,
                base_version=0,
                tokens=1,
                steps=1,
                weight=1.0 + number / 8,
            )
            for number in range(num_contributions)
        )
        recipe = Recipe(ingredients=ingredients, fraction=1.0, merge_rule="mean", settings_digest=sync.digest)
        self._adder = Adder(start_merge(recipe, slices, sync), slices[-1].stop)

    def add(self, payload: bytes) -> None:
        """What the outer does with a contribution."""
        assert self._adder.add(payload) is None


def entropy_bits(name: str, payload: bytes, num_values: int) -> float | None:
    """Order 0, of the levels that a payload was made of, in bits a value; None where there are none."""
    codec, decoded = codec_named(name), decode_with_scales(payload, num_values=num_values)
    if isinstance(codec, StepCodec):
        assert decoded.scales is not None
        units, block_values = decoded.scales, STEP_BLOCK_VALUES
    elif isinstance(codec, BlockCodec):
        blocks = np.pad(decoded.values, (0, -num_values % BLOCK_VALUES)).reshape(-1, BLOCK_VALUES)
        units, block_values = np.abs(blocks).max(axis=1) / codec.level_max, BLOCK_VALUES
    else:
        return None
    levels = np.rint(decoded.values / np.repeat(units, block_values)[:num_values]).astype(np.int64)
    shares = np.unique(levels, return_counts=True)[1] / levels.size
    return float(-(shares * np.log2(shares)).sum())


def relative_error(values: Vector, decoded: Vector) -> float:
    """Root of the mean square of what is lost, as a share of that of the values."""
    return float(np.linalg.norm((values - decoded).astype(np.float64)) / np.linalg.norm(values.astype(np.float64)))


def show(row: Row) -> None:
    """One line of the table."""
    entropy, over = (f"{row.entropy:.3f}", f"{row.over_entropy:.3f}") if row.entropy else ("", "")
    print(
        f"| {row.name} | {entropy} | {row.bits_of_few:.3f} | {row.bits:.3f} | {over} | {row.error:.4f} | "
        f"{row.encode} | {row.decode} |",
        flush=True,
    )


def compare(arguments: argparse.Namespace) -> bool:
    """Prints the table; whether every step codec keeps its bars."""
    fragment = Fragment(arguments.values, arguments.seed)
    print(f"{arguments.values} Gaussian values, seed {arguments.seed}; {arguments.pairs} pairs\n")
    print(f"| codec | entropy | bits of {FEW_VALUES} | bits of all | over entropy | error | encode | decode, add |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    is_reached = True
    for name in (*CODEC_NAMES, *STEPS):
        if arguments.only in name:
            row = fragment.measure(name, arguments.pairs)
            show(row)
            is_reached &= row.reaches_bars
    anew = speed_ratio(fragment.copy_anew, fragment.copy, num_pairs=arguments.pairs)
    print(f"\na copy into memory of its own: {anew} of the measure, which takes {anew.reference_seconds:.4f} s")
    print(
        f"bars for step codecs: bits {BITS_OVER_ENTROPY_MAX} of the entropy, encode {ENCODE_RATIO_MIN}, decode and add "
        f"{DECODE_RATIO_MIN}: {'reached' if is_reached else 'missed'}"
    )
    return is_reached


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of all values")
    parser.add_argument("--values", type=int, default=1 << 26, help="values of the fragment; 2^26 take 256 MiB")
    parser.add_argument("--pairs", type=int, default=5, help="times that each is done, in turns with the measure")
    parser.add_argument("--only", default="", help="codecs whose name has this in it")
    parser.add_argument("--short", action="store_true", help="few values: only shows that this works")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.values, arguments.pairs = 1 << 21, 2
    return arguments


def main() -> int:
    arguments = parse()
    torch.set_num_threads(1)
    announce()
    is_reached = compare(arguments)
    return 0 if is_reached or arguments.short else 1


if __name__ == "__main__":
    sys.exit(main())
