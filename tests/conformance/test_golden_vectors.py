"""Bytes that never change: a message written by an older isles must mean the same for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isles.proto.ids import ContributionId
from isles.proto.messages import (
    MESSAGES,
    Accepted,
    Alive,
    AskStatus,
    AskVersion,
    BlobRef,
    Checkpoint,
    Chunk,
    Commit,
    Conduct,
    Contribution,
    Credit,
    Error,
    Fetch,
    Grant,
    Habit,
    Hello,
    Hint,
    Ingredient,
    KeyInfo,
    Lease,
    Message,
    Offer,
    Pardon,
    Progress,
    Proof,
    Receipt,
    Recipe,
    Rejection,
    RelayAlive,
    RelayBeat,
    RelayFacts,
    Row,
    Settle,
    VersionInfo,
    VersionReply,
    pack,
    unpack,
)

ID = ContributionId("us-0", 3, "0123456789abcdef", 17)
BLOB = BlobRef(digest="5e" * 32, size_bytes=99)

MESSAGES_BY_NAME: dict[str, Message] = {
    "ask_status": AskStatus(request=1, reports_after=7),
    "ask_status_newest": AskStatus(request=1, wants_newest=True),
    "hello": Hello(request=1, role="worker", id="us-0", incarnation="0123456789abcdef", region="us"),
    "hello_given": Hello(
        request=1, role="worker", id="", incarnation="0123456789abcdef", store="ee" * 8, rejoin="dd" * 16
    ),
    "receipt": Receipt(request=3, id=ID),
    "relay_beat": RelayBeat(
        request=2,
        session="aa" * 8,
        facts=RelayFacts(region="us", num_clients=3, num_waiting=2, waiting_bytes=4096, round_trip_seconds=0.08),
        keys_sha256="5e" * 32,
    ),
    "relay_alive": RelayAlive(
        request=2, keys_sha256="5e" * 32, keys=(KeyInfo(name="us-1", role="worker", public="0" * 40),)
    ),
    "hello_with_proof": Hello(
        role="worker", id="us-1", incarnation="aa" * 8, proof=Proof(public="0" * 40, tags=("5e" * 32,))
    ),
    "pardon": Pardon(request=8, session="aa" * 8, learner="us-0"),
    "progress": Progress(request=2, session="aa" * 8, steps=24, tokens=4096, step_seconds=0.25),
    "offer": Offer(
        request=3,
        session="aa" * 8,
        contribution=Contribution(
            id=ID,
            base_version=4,
            blob=BLOB,
            codec="int4",
            tokens=4096,
            steps=24,
            seconds=1.5,
            norms=(1.0, 0.25),
            cursor={7: 12},
        ),
    ),
    "grant": Grant(request=3, transfer=8, offset=1 << 20, credit_chunks=8),
    "accepted": Accepted(request=3, id=ID),
    "chunk": Chunk(session="aa" * 8, transfer=8, offset=1 << 20),
    "credit": Credit(transfer=8, offset=1 << 21),
    "fetch": Fetch(request=9, session="aa" * 8, transfer=9, digest="5e" * 32),
    "fetch_sized": Fetch(request=9, session="aa" * 8, transfer=9, digest="5e" * 32, size_bytes=4096),
    "ask_version": AskVersion(request=4, session="aa" * 8, fragment=3, base_version=4),
    "version_reply": VersionReply(
        request=4,
        head=VersionInfo(fragment=3, version=5, epoch=1, parameters_sha256="7a" * 32, tokens_total=4096, update=BLOB),
        updates=(BLOB,),
        row=Row(id=ID, state="merged", settled_in=5, cursor={7: 12}, tokens=4096),
    ),
    "lease": Lease(request=5, session="bb" * 8, fragments=(0, 1)),
    "checkpoint": Checkpoint(
        request=7, session="bb" * 8, fragment=3, epoch=2, version=16, parameters=BLOB, momentum=BLOB
    ),
    "hint": Hint(broker_incarnation="cc" * 8, seq=812, kind="version", fragment=3, version=17),
    "error": Error(request=6, code="conflict", text="no"),
    "alive": Alive(request=2, typical_step_seconds=0.25, has_lost_shards=True),
    "settle": Settle(
        request=8,
        session="bb" * 8,
        fragment=3,
        epoch=2,
        rejections=(Rejection(id=ID, reason="too far", kind="norm"),),
    ),
    "commit": Commit(
        request=9,
        session="bb" * 8,
        commit_id="dd" * 8,
        fragment=3,
        epoch=2,
        base_version=16,
        parameters_sha256="7a" * 32,
        update=BLOB,
        recipe=Recipe(
            ingredients=(
                Ingredient(
                    id=ID, digest="5e" * 32, base_version=15, tokens=4096, steps=24, weight=2.0, clip=0.5, size_bytes=99
                ),
            ),
            fraction=0.25,
            merge_rule="mean",
            settings_digest="9c" * 32,
            conduct=Conduct(
                habits=(Habit(learner="us-0", version=17, norm=0.5, steps=24, weight=2.0, rate=4096.0, tokens=8192),),
                usual_tokens=1024.0,
                seen_unix=1e9,
            ),
        ),
    ),
}

TAGS = {
    1: "Hello", 2: "Welcome", 3: "Init", 4: "Initialised", 5: "Progress", 6: "Alive", 7: "Leave",
    10: "Offer", 11: "Grant", 12: "Accepted", 13: "Expired", 14: "Merged", 15: "Rejected", 16: "Fenced",
    17: "RetryAfter", 18: "Upload", 19: "Stored", 20: "Chunk", 21: "Credit", 22: "Fetch",
    30: "AskVersion", 31: "VersionReply", 32: "AskHeads", 33: "Heads", 34: "AskHistory", 35: "History",
    40: "Lease", 41: "Leased", 42: "List", 43: "Listing", 44: "Settle", 45: "Settled",
    46: "Commit", 47: "Committed", 48: "Stale", 49: "Checkpoint",
    50: "Shards", 51: "ShardsLeased", 52: "Report", 53: "Done", 54: "AskStatus", 55: "Status", 56: "Pardon",
    60: "Hint", 61: "Error", 70: "Receipt", 71: "RelayBeat", 72: "RelayAlive",
}  # fmt: skip


GOLDEN: dict[str, str] = json.loads((Path(__file__).parent / "golden_vectors.json").read_text())
"""Name -> header bytes in hexadecimal."""


@pytest.mark.parametrize("name", MESSAGES_BY_NAME)
def test_a_message_is_packed_to_the_bytes_it_always_was(name: str) -> None:
    assert pack(MESSAGES_BY_NAME[name]).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", MESSAGES_BY_NAME)
def test_bytes_of_long_ago_mean_what_they_always_meant(name: str) -> None:
    assert unpack(bytes.fromhex(GOLDEN[name])) == MESSAGES_BY_NAME[name]


def test_tags_keep_their_meaning() -> None:
    assert {tag: cls.__name__ for tag, cls in MESSAGES.items()} == TAGS
