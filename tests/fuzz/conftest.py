"""What everything that reads strangers' bytes is tried with: one message of each kind, and ways to spoil it."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, Final

import msgpack
import pytest

from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.ids import ContributionId
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import (
    MESSAGES,
    Accepted,
    Alive,
    AskHeads,
    AskHistory,
    AskStatus,
    AskVersion,
    BlobRef,
    Checkpoint,
    Chunk,
    Commit,
    Committed,
    Contribution,
    Credit,
    Done,
    Error,
    Expired,
    Fenced,
    Fetch,
    Grant,
    Head,
    Heads,
    Hello,
    Hint,
    History,
    Ingredient,
    Init,
    Initialised,
    KeyInfo,
    LearnerInfo,
    Lease,
    Leased,
    Leave,
    Limits,
    List,
    Listing,
    Merged,
    Message,
    Offer,
    Pardon,
    Progress,
    Receipt,
    Recipe,
    Rejected,
    Rejection,
    RelayAlive,
    RelayBeat,
    RelayFacts,
    Report,
    ReportInfo,
    RetryAfter,
    Row,
    Settle,
    Settled,
    Shards,
    ShardsLeased,
    Stale,
    Status,
    Stored,
    Upload,
    VersionInfo,
    VersionReply,
    Welcome,
    pack,
)

TOKEN: Final = "ab" * 8
ID: Final = ContributionId("us-1", 0, TOKEN, 3)
BLOB: Final = BlobRef(digest="5e" * 32, size_bytes=99)
SENTENCE_CHARACTERS_MAX: Final = 1000
"""Longest complaint about bad input: whoever sent it does not decide how long a log line is."""

NASTY: Final[tuple[Any, ...]] = (
    None, True, False, -1, 0, 1, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63), 0.5, -0.0, 1e308,
    float("nan"), float("inf"), float("-inf"),
    "", "us-2", "../../etc/passwd", "/", "..", "a\n", "a\0", "é", "\u202e", "x" * 65, "f" * 64, "F" * 64, "0" * 4097,
    b"", b"us-1", b"\xff\xfe", (), (0,), (None,) * 5, (1,) * 5000, {}, {"": 0}, {0: 0}, {-1: -1}, {None: None},
    {b"k": 1}, {"fragment": 0}, ("us-1", 0, TOKEN, 3), ("us-2", 4095, TOKEN, 2**53 - 1), ("us-1", 0, TOKEN),
    msgpack.Timestamp(0, 0), msgpack.ExtType(5, b"x"), "__class__", "isles.proto.messages:Hello", "os:system",
)  # fmt: skip
"""What may stand where something else is expected."""


def _record() -> RunRecord:
    specs = [TensorSpec("a", (4,), "float32", "parameter"), TensorSpec("b", (3,), "float32", "parameter")]
    manifest = Manifest.build(specs, {}, 2)
    return RunRecord(
        run="trial",
        seed=1,
        sync=SyncSettings(num_fragments=2, horizon_versions=4),
        budget=Budget(tokens=1000),
        manifest_digest=manifest.digest,
        manifest=manifest.to_text(),
        task="gpt",
        task_settings={"task.width": 32, "task.rate": 0.5, "task.name": "x", "task.on": True, "task.none": None},
        past_sync=(SyncSettings(num_fragments=2),),
    )


def _messages() -> tuple[Message, ...]:
    record = _record()
    contribution = Contribution(
        id=ID, base_version=1, blob=BLOB, codec="int4", tokens=9, steps=2, seconds=1.5, norms=(1.0, 0.5), cursor={3: 4}
    )
    ingredient = Ingredient(id=ID, digest=BLOB.digest, base_version=1, tokens=9, steps=2, weight=0.5, norms=(1.0,))
    recipe = Recipe(ingredients=(ingredient,), fraction=0.5, merge_rule="mean", settings_digest="2" * 64)
    version = VersionInfo(
        fragment=0, version=2, parameters_sha256="1" * 64, update=BLOB, parameters=BLOB, recipe=recipe, epoch=1
    )
    row = Row(id=ID, state="merged", settled_in=2, cursor={3: 4}, tokens=9)
    learner = LearnerInfo(learner="us-1", region="us", incarnation=TOKEN, is_live=True, last_seen_unix=1.0)
    figure = ReportInfo(seq=1, name="loss", value=-1.5, versions={0: 2}, reporter="eval", unix=1.0)
    return (
        Hello(role="worker", id="us-1", incarnation=TOKEN, stated={"sync.interval_steps": 4}, run="trial"),
        Welcome(
            new_session=TOKEN, protocol=(1, 1), broker_incarnation=TOKEN, seq=4, limits=Limits(), run_record=record,
            heads=(Head(fragment=0, version=2),), rows=(row,), shards={3: 4},
        ),
        Init(run_record=record, versions=(version,)),
        Initialised(is_mine=True),
        Progress(steps=4, tokens=40, step_seconds=0.25),
        Alive(typical_step_seconds=0.5),
        Leave(),
        Offer(contribution=contribution),
        Grant(transfer=1, offset=0, credit_chunks=8),
        Accepted(id=ID),
        Expired(id=ID, head=9),
        Merged(id=ID, version=2),
        Rejected(id=ID, reason="norm"),
        Fenced(epoch=3),
        RetryAfter(seconds=1.0, reason="full"),
        Upload(blob=BLOB),
        Stored(digest=BLOB.digest),
        Chunk(transfer=1, offset=0),
        Credit(transfer=1, offset=99),
        Fetch(transfer=1, digest=BLOB.digest),
        AskVersion(fragment=0, base_version=1),
        VersionReply(head=version, updates=(BLOB,), snapshot=version, row=row),
        AskHeads(),
        Heads(broker_incarnation=TOKEN, seq=4, heads=(Head(fragment=0, version=2),), rows=(row,)),
        AskHistory(fragment=0, first=1),
        History(versions=(version,)),
        Lease(fragments=(0, 1)),
        Leased(epochs={0: 1}, lease_seconds=3.0),
        List(fragment=0),
        Listing(head=version, pending=(contribution,), learners=(learner,), checkpoint=version),
        Settle(fragment=0, epoch=1, rejections=(Rejection(id=ID, reason="norm", kind="norm"),)),
        Settled(fragment=0),
        Commit(
            commit_id=TOKEN, fragment=0, epoch=1, base_version=1, parameters_sha256="1" * 64, update=BLOB,
            recipe=recipe,
        ),
        Committed(fragment=0, version=2),
        Stale(fragment=0, head=2),
        Checkpoint(fragment=0, epoch=1, version=2, parameters=BLOB, momentum=BLOB),
        Shards(num_wanted=4, returned={3: 4}),
        ShardsLeased(shards={3: 4}),
        Report(name="loss", value=1.5, versions={0: 2}),
        Done(),
        AskStatus(wants_record=True),
        Status(
            run="trial", broker_incarnation=TOKEN, uptime_seconds=1.0, progress=0.5, learners=(learner,),
            fragments=(version,), reports=(figure,), num_pending={0: 1}, run_record=record,
        ),
        Pardon(learner="us-1"),
        Receipt(request=1, id=contribution.id),
        RelayBeat(facts=RelayFacts(region="us", num_waiting=2, waiting_bytes=4096), keys_sha256="5e" * 32),
        RelayAlive(keys_sha256="5e" * 32, keys=(KeyInfo(name="us-1", role="worker", public="0" * 40),)),
        Hint(broker_incarnation=TOKEN, seq=5, kind="version", version=2),
        Error(code="denied", text="no"),
    )  # fmt: skip


EVERY: Final = _messages()
assert {type(message) for message in EVERY} == set(MESSAGES.values())


class Spoiler:
    """Spoils values and bytes; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def spoil_tree(self, tree: Any) -> Any:
        """The tree with one value somewhere in it replaced, left out, or repeated."""
        chance = self.chance
        if isinstance(tree, dict) and tree and chance.random() < 0.85:
            key = chance.choice(list(tree))
            rest = {other: value for other, value in tree.items() if other != key}
            match chance.randrange(8):
                case 0:
                    return rest
                case 1:
                    return {**tree, self._nasty_key(): chance.choice(NASTY)}
            return {**rest, key: self.spoil_tree(tree[key])}
        if type(tree) in (list, tuple) and tree and chance.random() < 0.85:
            place = chance.randrange(len(tree))
            items = list(tree)
            match chance.randrange(8):
                case 0:
                    del items[place]
                case 1 if len(items) < 50:
                    items *= chance.choice((2, 5, 500))
                case _:
                    items[place] = self.spoil_tree(items[place])
            return type(tree)(items)
        return chance.choice(NASTY)

    def _nasty_key(self) -> Any:
        key = self.chance.choice(NASTY)
        return repr(key)[:50] if isinstance(key, dict | list | float) or key is None else key

    def spoil_bytes(self, data: bytes) -> bytes:
        """The bytes with some of them flipped, cut off, doubled, or replaced by a length that is a lie."""
        chance, spoilt = self.chance, bytearray(data)
        for _ in range(chance.choice((1, 1, 1, 3, 20))):
            place = chance.randrange(len(spoilt) + 1)
            match chance.randrange(6):
                case 0:
                    del spoilt[place : place + chance.choice((1, 4, 1 << 20))]
                case 1:
                    spoilt[place:place] = chance.randbytes(chance.choice((1, 4, 40)))
                case 2:
                    lie = chance.choice((0, 1, 2**16 - 1, 2**31, 2**32 - 1))
                    spoilt[place : place + 5] = bytes((chance.randrange(0xC0, 0xE0),)) + struct.pack(">I", lie)
                case 3:
                    spoilt[place:place] = spoilt[chance.randrange(len(spoilt) + 1) :][:64]
                case 4 if place < len(spoilt):
                    spoilt[place] ^= 1 << chance.randrange(8)
                case _ if place < len(spoilt):
                    spoilt[place] = chance.randrange(256)
        return bytes(spoilt)

    def spoil_message(self, message: Message) -> bytes:
        """A header that was a message, and perhaps still is one."""
        tag, fields = msgpack.unpackb(pack(message), use_list=False, strict_map_key=False)
        tree: Any = (tag, fields)
        for _ in range(self.chance.choice((0, 1, 1, 2, 4))):
            tree = self.spoil_tree(tree)
        try:
            packed: bytes = msgpack.packb(tree)
        except (TypeError, ValueError):  # a key that no map can have
            packed = pack(message)
        return self.spoil_bytes(packed) if self.chance.random() < 0.4 else packed


@pytest.fixture
def spoilers() -> Callable[[int], Spoiler]:
    """Makes one from a seed."""
    return Spoiler


@pytest.fixture
def every_message() -> tuple[Message, ...]:
    """One of each kind."""
    return EVERY


@pytest.fixture
def run_record() -> RunRecord:
    return _record()


@pytest.fixture
def check_sentence() -> Callable[[Exception], None]:
    """Fails for a complaint that cannot stand in one line of a log."""

    def check(error: Exception) -> None:
        text = str(error)
        assert 0 < len(text) <= SENTENCE_CHARACTERS_MAX, repr(text)
        assert len(text.splitlines()) == 1, repr(text)

    return check
