"""What does one hostile learner of eight cost the run?

    .venv/bin/python -P benchmarks/hostile.py [--short] [--seeds 1] [--only NAME]

Learners of one process train the small byte-level GPT of `benchmarks/convergence` on its clock, counted in inner steps.
The arithmetic and every decision are the product's own: accounts, codecs, the screen of books and payloads, the
judgement of a round, recipes, merges and outer steps. One learner trains like the others and says something else:

    sign-flipped    the opposite of what it has learned
    scaled x100     a hundred times what it has learned
    not finite      NaN
    random          noise of the same length
    claims          what it has learned, as 10^12 tokens
    flipped and claims   the opposite, as 10^12 tokens
    boldest         noise, somewhat opposed, as long and as heavy as the limits let pass: not defended against

The figure is the validation loss of the global parameters at the end, in nats per byte, beside that of eight honest
learners and that of the seven others alone. Every row has equal initial parameters, data and time. Ends with 0 if no
row of one hostile learner is more than 3 % above that of eight honest ones and nothing honest was clipped or rejected;
`boldest` and the rows without the screen are only shown.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks`: nothing of it is installed

from benchmarks.convergence.cases import EVEN, INTERVAL_STEPS, TASK
from benchmarks.convergence.world import LATENCY, Learner, Open, Round, World
from benchmarks.measure.host import announce
from isles.outer.accumulators import l2_norm
from isles.outer.conduct import GROWTH_MAX, USUAL, Candidate, Judgement, Limits, judge, next_conduct
from isles.outer.ledger import make_recipe
from isles.outer.optimizer import make_version
from isles.outer.schedule import outer_rate
from isles.outer.screen import screen_books, screen_payload
from isles.outer.weights import by_name, token_weight
from isles.proto.agreement import SyncSettings
from isles.proto.codec import decode, encode
from isles.proto.codec.frame import pack
from isles.proto.codec.table import BLOCK_VALUES, BlockCodec, codec_named
from isles.proto.ids import ContributionId
from isles.proto.messages import Averages, BlobRef, Conduct, LearnerInfo
from isles.workers.task import Task, load_task

Vector = npt.NDArray[np.float32]

LOSS_RATIO_MAX: Final = 1.03
NUM_LEARNERS: Final = 8
CONTEXT: Final = 64
HOSTILE: Final = "l3"
"""One in the middle: neither the fastest nor the slowest."""
CLAIMED_TOKENS: Final = 10**12
BEGUN_UNIX: Final = 1e9
NO_LIMITS: Final = Limits(0.0, 0.0, 0.0, 0.0, 1.0)
SHORT_TASK: Final = {"layers": 1, "width": 32, "context": 32, "batch_size": 2, "validation_windows": 16}

ATTACKS: Final = ("sign-flipped", "scaled x100", "not finite", "random", "claims", "flipped and claims", "boldest")


class HostileWorld(World):
    """A world with one learner that does not say what it has learned, and an outer that screens."""

    def __init__(self, task: Task, sync: SyncSettings, *, attack: str, limits: Limits, seed: int, **sizes: Any) -> None:
        super().__init__(task, sync, seed=seed, spread=EVEN, **sizes)
        self.attack, self.limits = attack, limits
        self.noise = np.random.default_rng(seed)
        self.payloads: dict[ContributionId, bytes] = {}
        self.conducts = [Conduct() for _ in self.rounds]
        self.rejected: Counter[str] = Counter()
        self.clipped: Counter[str] = Counter()
        """Contributions of each learner, like `rejected`."""
        self.dismissed: set[str] = set()
        """Learners that the round under way does without."""
        self.loss = float("nan")
        if attack == "absent":
            (absent,) = (learner for learner in self.learners if learner.name == HOSTILE)
            self.learners.remove(absent)
            self.fleet.forget(absent.member)
            self.events = [event for event in self.events if event[3][0] is not absent]
            heapq.heapify(self.events)
            self.num_steps_all = len(self.learners) * sizes["num_steps"]

    # ------------------------------------------------------------------------------------------------------ a learner

    def contribute(self, learner: Learner, fragment: int) -> Open:
        """What arrives at the outer; the learner's own books stay those of an honest one."""
        honest = super().contribute(learner, fragment)
        is_hostile = learner.name == HOSTILE and self.attack
        sent, payload = self.spoiled(honest) if is_hostile else (honest, encode(self.sync.codec_up, honest.decoded))
        digest = hashlib.sha256(payload).hexdigest()
        blob = BlobRef(digest=digest, size_bytes=len(payload))
        self.payloads[sent.contribution.id] = payload
        return replace(sent, contribution=sent.contribution.model_copy(update={"blob": blob}))

    def spoiled(self, honest: Open) -> tuple[Open, bytes]:
        delta, books = honest.decoded, honest.contribution
        changes: dict[str, Any] = {}
        match self.attack:
            case "sign-flipped" | "flipped and claims":
                delta = -delta
            case "scaled x100":
                delta = delta * np.float32(100)
            case "random":
                delta = self.noise_like(delta)
            case "boldest":
                delta = (self.noise_like(delta) - np.float32(0.2) * delta) * np.float32(GROWTH_MAX * USUAL.clip_factor)
                changes = {"steps": 16 * books.steps, "tokens": 8 * books.tokens, "seconds": 8 * books.seconds}
            case "not finite":
                return honest, not_finite(self.sync.codec_up, delta.size)
        if self.attack in ("claims", "flipped and claims"):
            changes = {"tokens": CLAIMED_TOKENS}
        slices = self.manifest.slices(books.id.fragment)
        changes["norms"] = tuple(l2_norm(delta[one.start : one.stop]) for one in slices)
        payload = encode(self.sync.codec_up, delta)
        decoded = decode(payload, num_values=delta.size)
        return Open(books.model_copy(update=changes), decoded), payload

    def noise_like(self, delta: Vector) -> Vector:
        """Noise of the same L2 norm."""
        noise = self.noise.standard_normal(delta.size).astype(np.float32)
        return noise * np.float32(l2_norm(delta) / l2_norm(noise))

    def discard(self, learner: Learner, fragment: int) -> None:
        """Its contribution was rejected: it begins again at the newest version, as the protocol has it."""
        learner.opened.pop(fragment, None)
        version, values, _ = learner.arrived.pop(fragment, (learner.bases[fragment], None, False))
        change = learner.accounts[fragment].reset(values)
        learner.theta[fragment][:] = change.of(learner.theta[fragment])
        self.fleet.begin_again(learner.member)
        learner.bases[fragment], learner.steps[fragment] = version, 0

    # ------------------------------------------------------------------------------------------------------- the outer

    def info_of(self, learner: Learner) -> LearnerInfo:
        info = super().info_of(learner)
        is_liar = learner.name == HOSTILE and "claims" in self.attack
        return info.model_copy(update={"tokens_per_second": float(CLAIMED_TOKENS)}) if is_liar else info

    def merge(self, now: float, fragment: int) -> None:
        one = self.rounds[fragment]
        infos = [self.info_of(learner) for learner in self.learners]
        unix = BEGUN_UNIX + now
        self.dismissed.clear()
        candidates = self.screened(one, fragment, infos)
        judgement = judge(candidates, self.conducts[fragment], self.limits, unix=unix)
        if judgement.faults:
            self.reject(one, fragment, list(judgement.faults))
            candidates = [known for known in candidates if known.contribution.id not in judgement.faults]
            judgement = judge(candidates, self.conducts[fragment], self.limits, unix=unix)
        one.merge_at = None
        if not candidates:
            return
        self.clipped.update(name.learner for name in judgement.clips)
        self.conducts[fragment] = next_conduct(
            self.conducts[fragment], candidates, judgement, version=one.version + 1, unix=unix
        )
        expected = [info for info in infos if info.learner not in self.dismissed]
        self.publish(now, fragment, candidates, expected, judgement)

    def screened(self, one: Round, fragment: int, infos: Sequence[LearnerInfo]) -> list[Candidate]:
        known, slices = by_name(infos), self.manifest.slices(fragment)
        candidates, failed = [], []
        for opened in sorted(one.pending.values(), key=lambda opened: opened.contribution.id):
            books = opened.contribution
            found = screen_payload(books, self.payloads.pop(books.id), slices=slices, sync=self.sync)
            if found.reason or screen_books(books, head_version=one.version, slices=slices, sync=self.sync):
                failed.append(books.id)
            else:
                weight = token_weight(books, known.get(books.id.learner))
                candidates.append(Candidate(books, weight, found.norm, found.sketch))
        self.reject(one, fragment, failed)
        return candidates

    def reject(self, one: Round, fragment: int, ids: Sequence[ContributionId]) -> None:
        for name in ids:
            del one.pending[name.learner]
            self.rejected[name.learner] += 1
            self.dismissed.add(name.learner)
            self.discard(next(learner for learner in self.learners if learner.name == name.learner), fragment)

    def publish(
        self,
        now: float,
        fragment: int,
        candidates: Sequence[Candidate],
        infos: Sequence[LearnerInfo],
        judgement: Judgement,
    ) -> None:
        one = self.rounds[fragment]
        recipe = make_recipe(
            [known.contribution for known in candidates],
            infos,
            self.sync,
            head_version=one.version,
            learning_rate=outer_rate(self.sync, self.progress),
            averages=Averages(),
            grace_seconds=self.grace,
            waited_seconds=0.0,
            judgement=judgement,
        )
        merged = [one.pending[known.contribution.id.learner] for known in candidates]
        deltas = (opened.decoded for opened in merged)
        made = make_version(self.states[fragment], deltas, recipe, self.sync, self.manifest.slices(fragment))
        self.states[fragment] = made.state
        one.version, one.pending = one.version + 1, {}
        self.participants.append(len(merged))
        self.waits.append(now - one.opened_at)
        ids = frozenset(opened.contribution.id for opened in merged)
        self.at(now + LATENCY, self.on_version, fragment, one.version, made.state.parameters, ids)


def not_finite(codec_name: str, num_values: int) -> bytes:
    """What no encoder of ours writes: a payload of the run's block codec whose scales are NaN."""
    codec = codec_named(codec_name)
    assert isinstance(codec, BlockCodec)
    num_blocks = -(-num_values // BLOCK_VALUES)
    scales = np.full(num_blocks, np.nan, "<f2").tobytes()
    codes = bytes(codec.raw_bytes(num_values) - len(scales))
    return pack(codec, num_values=num_values, scale_exponent=0, raw=scales + codes)


# ------------------------------------------------------------------------------------------------------------ the rows


def run(attack: str, task: Task, limits: Limits, arguments: argparse.Namespace) -> list[HostileWorld]:
    """One world for each seed, at its end."""
    # Its codec is stated: what is not finite is written as a payload of blocks.
    sync = SyncSettings(
        interval_steps=INTERVAL_STEPS, codec_up="int4", codec_down="int4", merge_rule=arguments.merge_rule
    )
    sizes = {"num_learners": NUM_LEARNERS, "num_steps": arguments.steps}
    worlds = [
        HostileWorld(task, sync, attack=attack, limits=limits, seed=seed, **sizes)
        for seed in range(1, arguments.seeds + 1)
    ]
    for world in worlds:
        world.loss = world.run()
    return worlds


def show(name: str, worlds: Sequence[HostileWorld], honest_loss: float | None, seconds: float) -> tuple[float, bool]:
    """Prints a row; its loss, and whether nothing honest was clipped or rejected."""
    loss = statistics.fmean(world.loss for world in worlds)
    totals = sum((world.clipped for world in worlds), Counter()), sum((world.rejected for world in worlds), Counter())
    hostile = [total[HOSTILE] if any(world.attack for world in worlds) else 0 for total in totals]
    others = [total.total() - count for total, count in zip(totals, hostile, strict=True)]
    ratio = "" if honest_loss is None else f"{loss / honest_loss - 1:+.1%}"
    each = " ".join(f"{world.loss:.3f}" for world in worlds)
    print(
        f"| {name} | {loss:.3f} | {ratio} | {each} | {hostile[0]}, {hostile[1]} | {others[0]}, {others[1]} | "
        f"{seconds:.0f} |",
        flush=True,
    )
    return loss, not any(others)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--short", action="store_true", help="a tiny model, few steps: only shows that this works")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row, from seed 1 on")
    parser.add_argument("--steps", type=int, default=240, help="inner steps of an average learner")
    parser.add_argument("--only", default="", help="attacks whose name has this in it")
    parser.add_argument("--merge-rule", choices=("mean", "rda"), default="mean")
    parser.add_argument("--unlimited", action="store_true", help="also what each does where only payloads are screened")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.steps, arguments.seeds = 60, 1
    announce()
    torch.set_num_threads(1)
    task = load_task("gpt", SHORT_TASK if arguments.short else {**TASK, "context": CONTEXT})
    print(
        f"{NUM_LEARNERS} learners, {arguments.steps} inner steps, seeds 1..{arguments.seeds}, {arguments.merge_rule}\n"
    )
    print("| one of eight is | loss | | each seed | clipped, rejected | of the others | CPU seconds |")
    print("|---|---|---|---|---|---|---|")
    attacks = [name for name in ATTACKS if arguments.only in name]
    rows = [("", USUAL), ("absent", USUAL), *((name, USUAL) for name in attacks)]
    rows += [(name, NO_LIMITS) for name in attacks if arguments.unlimited]
    honest_loss: float | None = None
    is_kept = True
    for attack, limits in rows:
        begun = time.process_time()
        worlds = run(attack, task, limits, arguments)
        name = (attack or "honest") + ("" if limits is USUAL else ", no limits")
        loss, is_untouched = show(name, worlds, honest_loss, time.process_time() - begun)
        honest_loss = loss if honest_loss is None else honest_loss
        if limits is USUAL and attack != "boldest":
            is_kept &= is_untouched and (attack == "absent" or loss <= LOSS_RATIO_MAX * honest_loss)
    print(f"\nnothing honest touched, and all but the boldest within {LOSS_RATIO_MAX - 1:.0%}: {is_kept}")
    return 0 if is_kept or arguments.short else 1


if __name__ == "__main__":
    sys.exit(main())
