"""What does one hostile learner of eight cost the demo?

    .venv/bin/python -P benchmarks/hostile_demo.py [--only NAME] [--tokens N] [--seed 1] [--step-seconds S] [--short]

Each row is a run of `isles up` with its default task, with keys, broker, outer, evaluator and seven workers. The eighth
worker is a process of its own, which joins the run's broker with the run's worker key, as one on somebody else's
machine would. It trains like the others and says something else:

    none           what it has learned, so that eight equal processes train
    absent         nothing: there are seven
    sign-flipped   the opposite of it
    scaled x100    a hundred times as much
    not finite     NaN
    random         noise of the same length

What it says is put in place of what it has learned before anything is encoded, and its own books stay those of an
honest one. When it dies, or is put in quarantine, it is started again like anybody, half a minute later.

All runs have equal parameters to begin with and end at equal honest work, with the round in which it reaches the
budget of merged tokens. What is rejected counts for nothing, and the others make up for it. Noise is merged and
counts, so that run gets a seventh more. Beside eight honest workers is what the run would have come to without the
attack. Seven of them show what the eighth is worth: at equal tokens they take more steps each, over more rounds, and
end lower. Ends with 0 if all runs reach their budget, no attack's validation loss is more than 3 % above that of
eight honest workers, and nothing of the others was rejected, else with 1; --short only shows that everything works.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks`: nothing of it is installed

from benchmarks.measure.host import announce
from isles.ops.chaos.logbook import LogReader
from isles.ops.children import child_environment, isles_command
from isles.ops.history import pages
from isles.ops.run_folder import RunFolder
from isles.ops.tape import StoreTape
from isles.proto.config import DEFAULT_TOKENS
from isles.proto.errors import QuarantinedError
from isles.proto.key_files import client_file

if TYPE_CHECKING:
    import torch

    from isles.proto.agreement import SyncSettings
    from isles.workers.encoding import Encode, Encoded
    from isles.workers.flat import FlatModel

HONEST: Final = "none"
ABSENT: Final = "absent"
REFERENCES: Final = (HONEST, ABSENT)
ATTACKS: Final = ("sign-flipped", "scaled x100", "not finite", "random")
MERGED: Final = frozenset({"random"})
"""Attacks that no screen tells from work: what they say counts for the budget."""
LOSS_RATIO_MAX: Final = 1.03

WORKERS: Final = "us=4,eu=3"
EIGHTH: Final = "eu-3"
EIGHTH_REGION: Final = "eu"
NUM_WORKERS: Final = 8

SHORT_WORKERS: Final = "us=2,eu=2"
SHORT_NUM_WORKERS: Final = 5
"""With the eighth: one more than what directions are compared from."""
SHORT: Final = (
    "task.layers=1", "task.width=32", "task.heads=1", "task.context=32", "task.batch_size=4",
    "task.validation_windows=16", "sync.num_fragments=2", "sync.interval_steps=6",
)  # fmt: skip
SHORT_TOKENS: Final = 40_000

AGAIN_SECONDS: Final = 30.0
"""Before the eighth is started again: the longest delay that `isles up` has, which does not make it hammer."""
POLL_SECONDS: Final = 0.1
STOP_SECONDS: Final = 10.0
RUN_SECONDS_MAX: Final = 7200.0

REASONS: Final = {
    "opposed to": "direction",
    "times what is usual": "norm",
    "there was time for": "claim",
    "not finite": "finite",
}
"""Words of a rejection's reason -> its kind."""


# --------------------------------------------------------------------------------------------- the eighth's own process


class Liar:
    """Stands where a courier encodes and decodes: what goes out is a lie, what its learner subtracts is not."""

    def __init__(self, attack: str, seed: int) -> None:
        import torch

        self._attack = attack
        self._noise = torch.Generator().manual_seed(seed)
        self._honest: dict[bytes, bytes] = {}
        """Digest of a payload that was sent -> the honest one."""

    def encode_account(self, order: Encode, flat: FlatModel, sync: SyncSettings) -> Encoded | None:
        """In place of that of `isles.workers.encoding`, with the same arguments and result."""
        import torch

        from isles.workers.account import Account
        from isles.workers.encoding import Encoded, encode_account

        unmerged = order.account.contribution(order.theta)  # before `order.theta` is overwritten with it
        honest = encode_account(order, flat, sync)
        if honest is None or self._attack == HONEST:
            return honest
        sent: Encoded | None
        if self._attack == "not finite":
            from benchmarks.hostile import not_finite
            from isles.proto.messages import BlobRef

            payload = not_finite(honest.contribution.codec, unmerged.numel())
            blob = BlobRef(digest=hashlib.sha256(payload).hexdigest(), size_bytes=len(payload))
            sent = Encoded(honest.contribution.model_copy(update={"blob": blob}), payload)
        else:
            lie = self._spoiled(unmerged)
            sent = encode_account(replace(order, account=Account(lie), theta=torch.zeros_like(lie)), flat, sync)
        assert sent is not None, "what is not zero cannot be made zero by any of these"
        self._honest[hashlib.sha256(sent.payload).digest()] = honest.payload
        return sent

    def decode(self, payload: bytes, *, num_values: int) -> torch.Tensor:
        """In place of that of `isles.proto.codec.torch_codec`, which a courier calls for its own payloads alone."""
        from isles.proto.codec.torch_codec import decode

        return decode(self._honest.get(hashlib.sha256(payload).digest(), payload), num_values=num_values)

    def _spoiled(self, unmerged: torch.Tensor) -> torch.Tensor:
        """Another account of a fragment, [num_values] float32."""
        import torch

        match self._attack:
            case "sign-flipped":
                return -unmerged
            case "scaled x100":
                return 100.0 * unmerged
        noise = torch.randn(unmerged.shape, generator=self._noise)
        length: torch.Tensor = torch.linalg.vector_norm(unmerged) / torch.linalg.vector_norm(noise)
        return noise * length


def work(attack: str, seed: int, words: list[str]) -> int:
    """One worker that says what the attack has it say; `words` are those of `isles worker`."""
    from isles.ops.main import run

    liar = Liar(attack, seed)
    with patch.multiple("isles.workers.courier", encode_account=liar.encode_account, decode=liar.decode):
        return run(words)


# ------------------------------------------------------------------------------------------------------------- one run


@dataclass
class Outcome:
    """What came of one run."""

    summary: dict[str, Any]
    tokens: dict[str, float]
    """Learner -> merged tokens, mean over the fragments."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Kind -> contributions of the eighth."""
    num_clipped: int = 0
    """Contributions of the eighth."""
    num_others_rejected: int = 0
    is_quarantined: bool = False
    num_starts: int = 0
    """Of the eighth."""

    @property
    def loss(self) -> float:
        return float(self.summary["val_loss_last"])


class Eighth:
    """The process that does not belong to `isles up`; started again after it died, as anybody would."""

    def __init__(self, folder: RunFolder, attack: str, seed: int) -> None:
        own = [
            "worker", "--config", str(folder.config), "--key", str(client_file(folder.keys, "worker")),
            "--id", EIGHTH, "--region", EIGHTH_REGION, "--log-file", str(folder.log(EIGHTH)), "--exit-with-parent",
        ]  # fmt: skip
        self._command = [sys.executable, "-P", __file__, "--as-worker", attack, "--seed", str(seed), *own]
        self._output = folder.errors(EIGHTH)
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at: float | None = 0.0

    def look(self, now: float) -> None:
        """Starts it, if it is due."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            self._start_at = None if code == 0 else now + AGAIN_SECONDS
            if code not in (0, QuarantinedError.exit_code):
                print(f"the eighth worker ended with {code}: see {self._output}", file=sys.stderr)
        if self._process is None and self._start_at is not None and now >= self._start_at:
            with self._output.open("ab") as output:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,  # its end tells it that this process is gone
                    stdout=output,
                    stderr=output,
                    env=child_environment(NUM_WORKERS),
                )

    def close(self) -> None:
        """It has nobody to talk to any more."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def outcome(attack: str, path: Path, arguments: argparse.Namespace) -> Outcome:
    """The figures of one run, which takes place unless it was kept."""
    folder = RunFolder(path)
    if (folder.read_summary() or {}).get("status") != "finished":
        train(attack, folder, arguments)
    return read_outcome(folder)


def budget(attack: str, arguments: argparse.Namespace) -> int:
    """In merged tokens, for equal honest work."""
    num_workers = SHORT_NUM_WORKERS if arguments.short else NUM_WORKERS
    share = num_workers / (num_workers - 1) if attack in MERGED else 1.0
    tokens: int = arguments.tokens
    return round(tokens * share)


def train(attack: str, folder: RunFolder, arguments: argparse.Namespace) -> None:
    """One run, from the start of its processes to their end."""
    assignments = SHORT if arguments.short else ()
    command = isles_command(
        "up", "--run-dir", str(folder.path), "--workers", SHORT_WORKERS if arguments.short else WORKERS,
        "--seed", str(arguments.seed), "--step-seconds", str(arguments.step_seconds),
        "--tokens", str(budget(attack, arguments)),
        *(part for assignment in (*assignments, *arguments.set) for part in ("--set", assignment)), "--json",
    )  # fmt: skip
    environment = child_environment(NUM_WORKERS)  # which has all eight in mind
    eighth = Eighth(folder, attack, arguments.seed)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as up:
        try:
            _watch(up, folder, None if attack == ABSENT else eighth)
        finally:
            eighth.close()
            up.terminate()
    if up.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {up.returncode}")


def _watch(up: subprocess.Popen[bytes], folder: RunFolder, eighth: Eighth | None) -> None:
    """Until the run has ended. The eighth starts with the others."""
    log, is_begun = LogReader(folder.log("up")), False
    deadline = time.monotonic() + RUN_SECONDS_MAX
    while up.poll() is None:
        if time.monotonic() > deadline:
            raise SystemExit(f"the run of {folder.path} did not end within {RUN_SECONDS_MAX:g} s")
        started = (line.get("child") for line in log.read() if line["event"] == "child.started")
        is_begun = is_begun or "us-0" in started
        if eighth is not None and is_begun:
            eighth.look(time.monotonic())
        time.sleep(POLL_SECONDS)


def read_outcome(folder: RunFolder) -> Outcome:
    starts = (line for line in LogReader(folder.log(EIGHTH)).read() if line["event"] == "process.started")
    found = Outcome(folder.read_summary() or {}, merged_tokens(folder.store), num_starts=sum(1 for _ in starts))
    for line in LogReader(folder.log("broker")).read():
        if line["event"] == "contribution.rejected":
            if line["learner"] == EIGHTH:
                found.rejected[kind_of(str(line["reason"]))] += 1
            else:
                found.num_others_rejected += 1
        found.is_quarantined |= line["event"] == "learner.quarantined" and line["learner"] == EIGHTH
    clipped = (line for line in LogReader(folder.log("outer")).read() if line["event"] == "contribution.clipped")
    found.num_clipped = sum(line["learner"] == EIGHTH for line in clipped)
    return found


def merged_tokens(store: Path) -> dict[str, float]:
    """Learner -> merged tokens, mean over the fragments, from the recipes of all versions."""
    tape = StoreTape(store)
    try:
        fragments = [head.fragment for head in tape.heads()]
        total: Counter[str] = Counter()
        for fragment in fragments:
            for info in pages(tape, fragment, 0):
                for one in info.recipe.ingredients if info.recipe is not None else ():
                    total[one.id.learner] += one.tokens
    finally:
        tape.close()
    return {learner: tokens / len(fragments) for learner, tokens in total.items()}


def kind_of(reason: str) -> str:
    """In one word why something was rejected."""
    return next((kind for words, kind in REASONS.items() if words in reason), "other")


# ------------------------------------------------------------------------------------------------------------ the table

HEADING: Final = """
| the eighth | loss | beside eight | beside seven | merged tokens, of the others | rejected of it | clipped | rejected of others | seconds |
|---|---|---|---|---|---|---|---|---|"""  # noqa: E501


def show(attack: str, found: Outcome, references: Mapping[str, Outcome]) -> None:
    changes = [f"{found.loss / references[name].loss - 1:+.1%}" if name in references else "" for name in REFERENCES]
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(found.rejected.items())) or "0"
    kinds += f"; quarantined, started {found.num_starts} times" if found.is_quarantined else ""
    others = sum(tokens for learner, tokens in found.tokens.items() if learner != EIGHTH)
    participants = found.summary["participation_mean"]
    print(
        f"| {attack} | {found.loss:.4f} | {' | '.join(changes)} | {found.summary['tokens_merged']:,}, {others:,.0f} "
        f"({participants:.1f} a round) | {kinds} | {found.num_clipped} | {found.num_others_rejected} | "
        f"{found.summary['wall_seconds']:.0f} |",
        flush=True,
    )


@contextmanager
def scratch(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="attacks whose name has this in it, beside eight and seven honest workers"
    )
    parser.add_argument("--tokens", type=int, default=0, help="of honest work, merged; 0 = the demo's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="an inner step takes at least so long")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any setting of isles")
    parser.add_argument("--keep", type=Path, help="keep the run folders here, and take finished ones as they are")
    parser.add_argument("--short", action="store_true", help="a tiny model: only shows that this works")
    parser.add_argument("--as-worker", choices=(HONEST, *ATTACKS), help=argparse.SUPPRESS)
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    found.tokens = found.tokens or (SHORT_TOKENS if found.short else DEFAULT_TOKENS)
    return found


def main() -> int:
    arguments = parse(sys.argv[1:])
    if arguments.as_worker is not None:
        return work(arguments.as_worker, arguments.seed, arguments.words)
    announce()
    print(HEADING, flush=True)
    is_kept = True
    references: dict[str, Outcome] = {}
    with scratch(arguments.keep) as folder:
        for attack in (*REFERENCES, *(name for name in ATTACKS if arguments.only in name)):
            found = outcome(attack, folder / attack.replace(" ", "-"), arguments)
            show(attack, found, references)
            if attack in REFERENCES:
                references[attack] = found
            is_near = attack in REFERENCES or found.loss <= LOSS_RATIO_MAX * references[HONEST].loss
            is_kept &= is_near and not found.num_others_rejected
    print(f"\nall within {LOSS_RATIO_MAX - 1:.0%}, and nothing of the others rejected: {is_kept}")
    return 0 if is_kept or arguments.short else 1


if __name__ == "__main__":
    sys.exit(main())
