"""The whole wire: every message that crosses a socket, in one file.

A message is a msgpack array `[tag, {field: value}]`, validated strictly by the frozen model of its tag. Payload bytes
never stand inside it: they follow as a frame of their own, and only CHUNK has one.

Evolution: tags never change and are never used again; a new field has a default; an unknown field is ignored; a new
tag needs a higher minor protocol version. Golden byte vectors in `tests/conformance` pin all of this.

    client -> broker, control     HELLO INIT PROGRESS OFFER UPLOAD ASK_VERSION ASK_HEADS LEASE LIST SETTLE COMMIT
                                  CHECKPOINT ASK_HISTORY SHARDS REPORT ASK_STATUS LEAVE PARDON RELAY_BEAT
    broker -> client, control     WELCOME INITIALISED ALIVE GRANT ACCEPTED STORED EXPIRED MERGED REJECTED FENCED
                                  RETRY_AFTER VERSION HEADS LEASED LISTING SETTLED COMMITTED STALE HISTORY
                                  SHARDS_LEASED DONE STATUS RELAY_ALIVE ERROR
    relay -> client, control          RECEIPT, and all that a broker says
    both directions, bulk         CHUNK CREDIT; client -> broker also FETCH, broker -> client also ERROR
    broker -> everybody, events   HINT: a lost one costs latency, never correctness
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isles.proto.agreement import NotNegative, RunRecord, Scalar, Share
from isles.proto.errors import MessageError
from isles.proto.ids import ContributionId, Digest, FragmentId, Name, NameOrNone, Token, Version
from isles.proto.keys import ALLOWED_MAX, BROKER_KEYS_MAX, KEY_LENGTH, KeyRole

PROTOCOL_MAJOR: Final = 1
PROTOCOL_MINOR: Final = 2

HEADER_BYTES_MAX: Final = 8 << 20
"""Longest header: a run record with the manifest of a model of 50,000 tensors fits."""

CHUNK_BYTES: Final = 1 << 20
"""Payload bytes of one CHUNK: CURVE is fastest here, and a heartbeat never waits behind more than this."""

CHUNK_BYTES_MAX: Final = 16 << 20
"""Longest CHUNK that a broker may be set to: a socket holds a whole one of every connection."""

HEADER_VALUES_MAX: Final = 1 << 20
"""Most values in one header, a map counted as MAP_VALUES: a LISTING or HISTORY of the longest kind has under 940,000.
A byte may stand for a value that takes 60 in memory, so 8 MiB alone would not keep a header from filling it."""
MAP_VALUES: Final = 4
"""What a map counts besides what it holds: even an empty one takes as much memory as some numbers do."""
ARRAY_VALUES_MAX: Final = 65_536
"""Longest array in a header: the norms of a fragment's tensors."""
MAP_ENTRIES_MAX: Final = 4096
"""Longest map in a header: a cursor over all shards, or something of every fragment."""

SHARDS_MAX: Final = 4096
LEARNERS_MAX: Final = 4096
TENSORS_PER_FRAGMENT_MAX: Final = 65_536
RELAYS_MAX: Final = 256
"""Relays that one broker knows: one or two for each place."""

Role = Literal["worker", "outer", "evaluator", "operator", "relay"]
RowState = Literal["pending", "merged", "rejected"]
COUNT_MAX: Final = 2**53 - 1
"""Exact in a float, too; sums of counts stop here."""

Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Text = Annotated[str, Field(max_length=2000)]
Cursor = Annotated[dict[Annotated[int, Field(ge=0, lt=SHARDS_MAX)], Count], Field(max_length=SHARDS_MAX)]
"""Data shard -> number of items taken from it since the beginning of the run."""


class Channel(StrEnum):
    """The three socket pairs between a client and its broker."""

    CONTROL = "control"
    BULK = "bulk"
    EVENTS = "events"

    __hash__ = str.__hash__  # that of an Enum is written in Python, and each message is looked up by its channel


class Part(BaseModel):
    """A value inside messages."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    def changed(self, **fields: Any) -> Self:
        """`model_copy` with other fields, which are not checked either, in half the time: all that is sent needs it."""
        copied = object.__new__(type(self))
        for name, value in (
            ("__dict__", self.__dict__ | fields),
            ("__pydantic_fields_set__", self.__pydantic_fields_set__.union(fields)),
            ("__pydantic_extra__", None),
            ("__pydantic_private__", None),
        ):
            object.__setattr__(copied, name, value)
        return copied


class Message(Part):
    """What all messages have."""

    tag: ClassVar[int] = 0
    request: Count = 0
    """Drawn by the asker; the reply repeats it; 0 = nobody asked."""
    session: Annotated[str, Field(max_length=64)] = ""
    """Set by clients: the token of their WELCOME; empty in HELLO and in everything a broker sends."""

    def addressed(self, *, request: int, session: str = "") -> Self:
        """This message with another number and session, as it is sent."""
        return self.changed(request=request, session=session)


# ------------------------------------------------------------------------------------------------- values in messages


class BlobRef(Part):
    """Some stored bytes."""

    digest: Digest
    size_bytes: Count


class Contribution(Part):
    """A delta with its books; the payload itself is the blob."""

    id: ContributionId
    base_version: Version
    blob: BlobRef
    codec: Annotated[str, Field(max_length=32)]
    tokens: Count
    steps: Count
    seconds: NotNegative
    """Time the learner spent on this work: tokens / seconds is the rate behind the fraction f."""
    norms: Annotated[tuple[NotNegative, ...], Field(max_length=TENSORS_PER_FRAGMENT_MAX, fail_fast=True)]
    """L2 norm of the account U before quantisation, per tensor of the fragment, in manifest order."""
    cursor: Cursor = {}


class Proof(Part):
    """Shows the home broker who made a message that a relay hands over (`isles.proto.proofs`)."""

    public: Annotated[str, Field(max_length=KEY_LENGTH)]
    """Public key (z85) of its maker."""
    tags: Annotated[tuple[Digest, ...], Field(min_length=1, max_length=BROKER_KEYS_MAX)]
    """One for each public key of the home broker that the maker knows: one of them is the present one."""


class KeyInfo(Part):
    """One entry of the home broker's allow-list."""

    name: Name
    role: KeyRole
    public: Annotated[str, Field(min_length=KEY_LENGTH, max_length=KEY_LENGTH)]


class Row(Part):
    """The store's permanent entry of one (learner, fragment): its last accepted contribution and what became of it."""

    id: ContributionId
    state: RowState
    settled_in: Version | None = None
    """The version that contains it; set exactly if merged."""
    reason: Text = ""
    """Why it was rejected."""
    cursor: Cursor = {}
    tokens: Count = 0


class Ingredient(Part):
    """One merged contribution as a recipe records it."""

    id: ContributionId
    digest: Digest
    base_version: Version
    tokens: Count
    steps: Count
    weight: NotNegative
    clip: NotNegative = 1.0
    """Factor on the delta before the merge; 1 = as it came."""
    norms: Annotated[tuple[NotNegative, ...], Field(max_length=TENSORS_PER_FRAGMENT_MAX, fail_fast=True)] = ()
    """Of the contribution, where the merge rule uses them."""
    size_bytes: Count = 0
    """Of the payload, so that whoever recomputes the version can fetch it."""


class Averages(Part):
    """Exponential moving averages behind the grace window, in seconds; carried from version to version."""

    step_seconds: NotNegative = 0.0
    quorum_seconds: NotNegative = 0.0
    sync_seconds: NotNegative = 0.0


class Habit(Part):
    """What a learner's last merged contribution to a fragment was like: what the next ones of all are compared with."""

    learner: Name
    version: Version
    """The one that it is in."""
    norm: NotNegative = 0.0
    """L2 norm of its delta as merged, counters left out; 0 = was not measured."""
    steps: Count = 0
    weight: NotNegative = 0.0
    rate: NotNegative = 0.0
    """Tokens per second by its own word; 0 = not known."""
    tokens: Count = 0
    """Of all contributions of this learner to this fragment since it has had habits."""
    clips: Count = 0
    """How many in a row, this one the last, were scaled down among contributions that could tell the odd one out."""


class Conduct(Part):
    """What the next contributions to a fragment are judged by; carried from version to version."""

    habits: Annotated[tuple[Habit, ...], Field(max_length=LEARNERS_MAX, fail_fast=True)] = ()
    """Of the learners merged last, in order of their names."""
    usual_tokens: NotNegative = 0.0
    """What a learner of the median rate can have done since the first recipe that has this."""
    seen_unix: NotNegative = 0.0
    """The broker's time when this version was planned."""


class Recipe(Part):
    """What a version was made from: with the payloads, enough to recompute it bit by bit."""

    ingredients: Annotated[tuple[Ingredient, ...], Field(max_length=LEARNERS_MAX, fail_fast=True)]
    """In sorted id order, which is the order of the sums."""
    fraction: Share
    merge_rule: Annotated[str, Field(max_length=32)]
    settings_digest: Digest
    learning_rate: NotNegative | None = None
    """Of this outer step; None = the constant one of the settings."""
    averages: Averages = Averages()
    grace_seconds: NotNegative = 0.0
    waited_seconds: NotNegative = 0.0
    conduct: Conduct = Conduct()

    def digest(self) -> str:
        """SHA-256 of the packed fields, those left out that have their default: a newer field changes no old digest."""
        packed: bytes = msgpack.packb(self.model_dump(mode="python", exclude_defaults=True))
        return hashlib.sha256(packed).hexdigest()


class VersionInfo(Part):
    """One version of one fragment. Blobs that retention has removed are None.

    A version that was checkpointed also has its whole state: `parameters`, and `momentum` and `remainder` unless they
    are zeros.
    """

    fragment: FragmentId
    version: Version
    epoch: Count = 0
    parameters_sha256: Digest
    """Of the fp32 little-endian bytes of the flat parameters."""
    optimizer_sha256: Digest | None = None
    """Of the fp32 little-endian bytes of the momentum, then of the remainder; a part that is left out has none."""
    tokens_total: Count = 0
    """Tokens in this version since version 0."""
    num_participants: Count = 0
    update: BlobRef | None = None
    parameters: BlobRef | None = None
    momentum: BlobRef | None = None
    remainder: BlobRef | None = None
    recipe: Recipe | None = None
    recipe_sha256: Digest | None = None
    """Of the recipe as it was committed: the whole of it may not come along, and it may be damaged in the store."""
    committed_unix: NotNegative = 0.0


class Head(Part):
    """The newest version of a fragment, in short."""

    fragment: FragmentId
    version: Version
    tokens_total: Count = 0


class LearnerInfo(Part):
    """What the broker knows of a learner."""

    learner: Name
    region: Name
    incarnation: Token
    is_live: bool
    last_seen_unix: NotNegative
    tokens: Count = 0
    steps: Count = 0
    tokens_per_second: NotNegative = 0.0
    """Measured by the broker from the counters of PROGRESS, on its own clock."""
    step_seconds: NotNegative = 0.0
    num_shards: Count = 0
    is_draining: bool = False
    """Hands in what it has left and takes no further step, so a round need not wait for it."""


class LeaseInfo(Part):
    """Who merges a fragment."""

    fragment: FragmentId
    holder: Name
    epoch: Count
    expires_seconds: float
    """From now; negative = expired."""


class ReportInfo(Part):
    """One figure that a subscriber found out, such as the evaluator's loss."""

    seq: Count
    name: Annotated[str, Field(max_length=64)]
    value: float
    versions: dict[FragmentId, Version]
    tokens: NotNegative = 0.0
    reporter: Name
    unix: NotNegative


class Totals(Part):
    """Counters over the whole run, from the store."""

    rounds_committed: Count = 0
    tokens_merged: NotNegative = 0.0
    """Mean over fragments."""
    tokens_produced: Count = 0
    """Sum of the learners' own counters of tokens to their last PROGRESS; of each at least what was accepted of it."""
    merged: Count = 0
    rejected: Count = 0
    expired: Count = 0
    participation_mean: NotNegative = 0.0
    """Contributions per committed round."""
    fraction_mean: NotNegative = 0.0
    staleness_mean: NotNegative = 0.0
    bytes_up: Count = 0
    """Payload bytes of accepted contributions."""
    bytes_down: Count = 0
    """Payload bytes sent to workers, evaluators and relays."""
    update_bytes: Count = 0
    """Payload bytes of all published updates, each counted once."""


class WarningInfo(Part):
    """Something that is wrong with a run although every process works, for as long as it lasts."""

    name: Annotated[str, Field(max_length=64)]
    """Of the log event that it began with."""
    subject: Annotated[str, Field(max_length=64)] = ""
    """The learner, or the part of the store, that it is about; empty = the run."""
    text: Text
    """What is wrong and what to do, for people."""
    since_unix: NotNegative


class StoreInfo(Part):
    """How full a broker's store is."""

    stored_bytes: Count
    """Of all payloads."""
    stored_bytes_max: Count | None = None
    """None = only the disk bounds them."""
    disk_free_bytes: Count
    disk_free_bytes_min: Count = 0
    """With less than that free, uploads wait."""


class RelayFacts(Part):
    """What a relay tells of itself."""

    region: Name = "local"
    num_clients: Count = 0
    """Processes with an open session that it speaks for."""
    num_waiting: Count = 0
    """Contributions that it has and the home broker has not."""
    waiting_bytes: Count = 0
    waiting_bytes_max: Count = 0
    cache_bytes: Count = 0
    cache_bytes_max: Count = 0
    round_trip_seconds: NotNegative = 0.0
    """Of the last beat before this one; 0 = there was none."""
    bytes_up: Count = 0
    """Payload bytes sent to the home broker since this relay started."""
    bytes_down: Count = 0
    """Payload bytes fetched from the home broker since then."""


class RelayInfo(Part):
    """What the home broker knows of a relay."""

    relay: Name
    is_live: bool
    last_seen_unix: NotNegative
    facts: RelayFacts = RelayFacts()


class Limits(Part):
    """What the broker asks of its clients."""

    chunk_bytes: Annotated[int, Field(ge=4096, le=CHUNK_BYTES_MAX)] = CHUNK_BYTES
    credit_chunks: Annotated[int, Field(ge=1, le=1024)] = 8
    """CHUNKs that may be under way in one transfer."""
    heartbeat_seconds: Annotated[float, Field(gt=0)] = 1.0
    learner_lease_seconds: Annotated[float, Field(gt=0)] = 10.0
    outer_lease_seconds: Annotated[float, Field(gt=0)] = 3.0


# ------------------------------------------------------------------------------------------------ joining and leaving


class Hello(Message):
    """Client -> broker: who I am. Makes the incarnation current; older ones of the same id are fenced from then on.

    Also the way to a new session after the broker forgot the old one.
    """

    tag = 1
    protocol_min: tuple[Count, Count] = (PROTOCOL_MAJOR, 0)
    protocol_max: tuple[Count, Count] = (PROTOCOL_MAJOR, PROTOCOL_MINOR)
    run: Annotated[str, Field(max_length=64)] = ""
    """Empty = whichever run this broker serves."""
    role: Role
    id: NameOrNone
    """Empty = a worker with a key asks for an id; the answer tells it, and with what to come back."""
    incarnation: Token
    region: Name = "local"
    manifest_digest: Annotated[str, Field(max_length=64)] = ""
    """Empty = has no model yet and will build it from the run record."""
    stated: dict[Annotated[str, Field(max_length=128)], Scalar] = {}
    """Settings this process was given on purpose, dotted; each must equal the run's."""
    store: Annotated[str, Field(max_length=64)] = ""
    """The store that this process's state is of, as WELCOME named it; empty = it has none. Another one is refused."""
    rejoin: Annotated[str, Field(max_length=64)] = ""
    """What WELCOME told with an id that the broker gave: only with it is such an id taken again."""
    proof: Proof | None = None
    """Needed where a relay hands it over to a broker with keys."""


class Welcome(Message):
    """Broker -> client: the state of the run, read in one transaction."""

    tag = 2
    new_session: Token
    protocol: tuple[Count, Count]
    broker_incarnation: Token
    seq: Count
    """Of the last hint: later ones have higher numbers."""
    limits: Limits
    run_record: RunRecord | None = None
    """None = this run has no parameters yet: the first worker's INIT gives them."""
    heads: Annotated[tuple[Head, ...], Field(max_length=4096, fail_fast=True)] = ()
    rows: Annotated[tuple[Row, ...], Field(max_length=4096, fail_fast=True)] = ()
    """The asking learner's own rows."""
    shards: Cursor = {}
    """The data shards the asking learner holds, with their cursors."""
    store: Annotated[str, Field(max_length=64)] = ""
    """Random name of the store, drawn once: tells two runs of one name apart."""
    learner: NameOrNone = ""
    """The asking worker's id, which the broker gives if HELLO has none."""
    rejoin: Annotated[str, Field(max_length=64)] = ""
    """With an id that the broker gave: the token that HELLO needs from now on; else empty."""


class Init(Message):
    """Worker or operator -> broker: the run record and version 0, whose blobs were uploaded before.

    The first writer wins, atomically.
    """

    tag = 3
    run_record: RunRecord
    versions: Annotated[tuple[VersionInfo, ...], Field(max_length=4096, fail_fast=True)]


class Initialised(Message):
    """Broker -> its sender: the run exists; `is_mine` says whose INIT it was. Say HELLO again to learn its state."""

    tag = 4
    is_mine: bool


class Progress(Message):
    """Worker -> broker, every heartbeat: counters since this learner's incarnation began. Renews its leases."""

    tag = 5
    steps: Count = 0
    tokens: Count = 0
    step_seconds: NotNegative = 0.0
    """Moving average of one inner step."""
    is_draining: bool = False
    """From now on only what is left is handed in."""


class Alive(Message):
    """Broker -> client: PROGRESS was heard."""

    tag = 6
    typical_step_seconds: NotNegative = 0.0
    """Median of one inner step over the live learners that have told theirs; 0 = none has."""
    has_lost_shards: bool = False
    """The asker was silent beyond its lease, so its data shards may be others' by now: it is to ask for some again."""


class Leave(Message):
    """Client -> broker: I am going; my leases are free. Answered by DONE."""

    tag = 7


# ------------------------------------------------------------------------------------------------------- contributing


class Offer(Message):
    """Worker -> broker: may I send this? Repeated with the same bytes until answered by more than GRANT."""

    tag = 10
    contribution: Contribution
    proof: Proof | None = None
    """Needed where a relay hands it over to a broker with keys."""


class Grant(Message):
    """Broker -> client: send CHUNKs of the asked-for upload from `offset`, at most `credit_chunks` unanswered."""

    tag = 11
    transfer: Count
    offset: Count
    credit_chunks: Count


class Accepted(Message):
    """Broker -> worker: durable here; will be merged, or rejected by screening."""

    tag = 12
    id: ContributionId


class Expired(Message):
    """Broker -> worker: the base is too far behind the head; never stored, the work stays in the learner's account."""

    tag = 13
    id: ContributionId
    head: Version


class Merged(Message):
    """Broker -> worker, in answer to a repeated OFFER: it is in `version`."""

    tag = 14
    id: ContributionId
    version: Version


class Rejected(Message):
    """Broker -> worker: failed the screen; is in no version."""

    tag = 15
    id: ContributionId
    reason: Text


class Fenced(Message):
    """Broker -> client: a newer incarnation of you exists (or, for COMMIT and SETTLE, a newer epoch)."""

    tag = 16
    epoch: Count = 0


class RetryAfter(Message):
    """Broker -> client: not now (disk, quota); ask again then. Nothing was lost."""

    tag = 17
    seconds: Annotated[float, Field(gt=0, le=3600)]
    reason: Text


class Upload(Message):
    """Who says INIT, COMMIT or CHECKPOINT -> broker: a blob that it will refer to. Answered by GRANT, later STORED."""

    tag = 18
    blob: BlobRef


class Stored(Message):
    """Broker -> client: the blob is durable."""

    tag = 19
    digest: Digest


# ----------------------------------------------------------------------------------------------------------- transfer


class Chunk(Message):
    """Bulk, both directions; one payload frame follows: the bytes of `transfer` from `offset`."""

    tag = 20
    transfer: Count
    offset: Count


class Credit(Message):
    """Bulk, both directions: the receiver of CHUNKs has taken everything below `offset` and may be sent more."""

    tag = 21
    transfer: Count
    offset: Count


class Fetch(Message):
    """Client -> broker, bulk: CHUNKs of this blob from `offset`; the asker chooses the transfer number."""

    tag = 22
    transfer: Count
    digest: Digest
    offset: Count = 0
    credit_chunks: Annotated[int, Field(ge=1, le=1024)] = 8
    size_bytes: Count = 0
    """Of the whole blob, for a relay, which asks for it once and has no books; 0 = not told."""


# ----------------------------------------------------------------------------------------------------------- versions


class AskVersion(Message):
    """Worker or evaluator -> broker: bring me from `base_version` (None = I have nothing) to the head."""

    tag = 30
    fragment: FragmentId
    base_version: Version | None = None


class VersionReply(Message):
    """Broker -> worker: the way to the head, and the asker's own row, read in the same transaction.

    `updates` lead from the base, or from the whole parameters of the older version `snapshot`, to the head, in order.
    There are none if that is the head already.
    """

    tag = 31
    head: VersionInfo
    updates: Annotated[tuple[BlobRef, ...], Field(max_length=4096, fail_fast=True)] = ()
    snapshot: VersionInfo | None = None
    """A checkpointed version to begin with; None = begin with the base."""
    row: Row | None = None


class AskHeads(Message):
    """Client -> broker, now and then: all heads and the asker's rows, so that no correctness rests on hints."""

    tag = 32


class Heads(Message):
    """Broker -> client."""

    tag = 33
    broker_incarnation: Token
    seq: Count
    heads: Annotated[tuple[Head, ...], Field(max_length=4096, fail_fast=True)]
    rows: Annotated[tuple[Row, ...], Field(max_length=4096, fail_fast=True)] = ()


class AskHistory(Message):
    """Anybody -> broker: the versions of one fragment from `first`, with recipes; at most `num_max` of them."""

    tag = 34
    fragment: FragmentId
    first: Version = 0
    num_max: Annotated[int, Field(ge=1, le=256)] = 64


class History(Message):
    """Broker -> anybody: contiguous versions in order."""

    tag = 35
    versions: Annotated[tuple[VersionInfo, ...], Field(max_length=256, fail_fast=True)]


# ------------------------------------------------------------------------------------------------------------ merging


class Lease(Message):
    """Outer -> broker: let me merge these fragments, or renew. Granted are those that are free or mine already."""

    tag = 40
    fragments: Annotated[tuple[FragmentId, ...], Field(max_length=4096, fail_fast=True)]
    num_required: Annotated[int, Field(ge=0, le=LEARNERS_MAX)] = 0
    """Live learners without which I merge nothing; for whoever asks for the status."""


class Leased(Message):
    """Broker -> outer: fragment -> epoch of those that are yours; the others are somebody else's for now."""

    tag = 41
    epochs: dict[FragmentId, Count]
    lease_seconds: Annotated[float, Field(gt=0)]


class List(Message):
    """Outer -> broker: everything one round needs."""

    tag = 42
    fragment: FragmentId


class Listing(Message):
    """Broker -> outer, read in one transaction: head, pending contributions in sorted id order, learners."""

    tag = 43
    head: VersionInfo
    pending: Annotated[tuple[Contribution, ...], Field(max_length=LEARNERS_MAX, fail_fast=True)]
    learners: Annotated[tuple[LearnerInfo, ...], Field(max_length=LEARNERS_MAX, fail_fast=True)]
    checkpoint: VersionInfo | None = None
    """The newest version whose whole state is in the store, without its recipe; those after it are recomputed."""


class Rejection(Part):
    """One contribution that failed the screen."""

    id: ContributionId
    reason: Text
    kind: Annotated[str, Field(max_length=32)] = ""
    """The reason in one word: books, payload, finite, norm, direction, claim or step, which are the learner's fault;
    lost, which is not; empty = not known."""


class Settle(Message):
    """Outer -> broker: these failed the screen; a transaction of its own that needs no version."""

    tag = 44
    fragment: FragmentId
    epoch: Count
    rejections: Annotated[tuple[Rejection, ...], Field(max_length=LEARNERS_MAX, fail_fast=True)]


class Settled(Message):
    """Broker -> outer."""

    tag = 45
    fragment: FragmentId


class Commit(Message):
    """Outer -> broker: version `base_version + 1`, by compare-and-set in one transaction.

    Holds if the head is `base_version` and every ingredient's row is pending with that id. The answer is COMMITTED
    (also for a repeated commit id), STALE, or FENCED if the epoch is old.
    """

    tag = 46
    commit_id: Token
    fragment: FragmentId
    epoch: Count
    base_version: Version
    parameters_sha256: Digest
    optimizer_sha256: Digest | None = None
    update: BlobRef
    recipe: Recipe


class Committed(Message):
    """Broker -> outer: the version exists."""

    tag = 47
    fragment: FragmentId
    version: Version
    is_repeat: bool = False
    """This commit id was committed before: the answer to the first one was lost."""


class Stale(Message):
    """Broker -> outer: the head or a row is not what the commit says; LIST again."""

    tag = 48
    fragment: FragmentId
    head: Version
    reason: Text = ""


class Checkpoint(Message):
    """Outer -> broker: the whole state of a committed version, uploaded before. Answered by DONE, or FENCED.

    From then on a new outer begins there, and what only served to recompute older versions may go.
    """

    tag = 49
    fragment: FragmentId
    epoch: Count
    version: Version
    parameters: BlobRef
    momentum: BlobRef | None = None
    remainder: BlobRef | None = None


# ------------------------------------------------------------------------------------------- data shards and reporting


class Shards(Message):
    """Worker -> broker: I want to hold `num_wanted` data shards and give these back with their cursors."""

    tag = 50
    num_wanted: Annotated[int, Field(ge=0, le=SHARDS_MAX)]
    returned: Cursor = {}


class ShardsLeased(Message):
    """Broker -> worker: all shards that are yours now, with their cursors; perhaps fewer than wanted."""

    tag = 51
    shards: Cursor


class Report(Message):
    """Evaluator -> broker: a figure about the global parameters at these versions. Answered by DONE."""

    tag = 52
    name: Annotated[str, Field(max_length=64)]
    value: float
    versions: dict[FragmentId, Version] = {}
    tokens: NotNegative = 0.0


class Done(Message):
    """Broker -> client: it is in the store."""

    tag = 53


class AskStatus(Message):
    """Anybody -> broker: what there is to see. Needs no session."""

    tag = 54
    reports_after: Count = 0
    """Only reports with a higher seq."""
    wants_newest: bool = False
    """Of more reports than one answer holds, the newest; else the oldest, and the asker goes on after them."""
    wants_record: bool = False
    """Whether the run record is wanted, too."""


class Status(Message):
    """Broker -> anybody."""

    tag = 55
    run: Annotated[str, Field(max_length=64)]
    """Empty = not initialised yet."""
    broker_incarnation: Token
    uptime_seconds: NotNegative
    progress: Share
    """The global step as a share of the budget."""
    num_parameters: Count = 0
    settings_epoch: Count = 0
    """How often the settings of the synchronisation were changed since the run began."""
    learners: Annotated[tuple[LearnerInfo, ...], Field(max_length=LEARNERS_MAX, fail_fast=True)] = ()
    fragments: Annotated[tuple[VersionInfo, ...], Field(max_length=4096, fail_fast=True)] = ()
    num_pending: dict[FragmentId, Count] = {}
    leases: Annotated[tuple[LeaseInfo, ...], Field(max_length=4096, fail_fast=True)] = ()
    reports: Annotated[tuple[ReportInfo, ...], Field(max_length=4096, fail_fast=True)] = ()
    totals: Totals = Totals()
    warnings: Annotated[tuple[WarningInfo, ...], Field(max_length=256, fail_fast=True)] = ()
    """What lasts now, the oldest first."""
    unix: NotNegative = 0.0
    """The broker's clock, in seconds since 1970; 0 = not told."""
    version: Annotated[str, Field(max_length=64)] = ""
    """Of the broker's isles; empty = not told."""
    limits: Limits | None = None
    store: StoreInfo | None = None
    num_required: Count = 0
    """Live learners without which the outer merges nothing; 0 = any number will do."""
    relays: Annotated[tuple[RelayInfo, ...], Field(max_length=RELAYS_MAX, fail_fast=True)] = ()
    """Heard since the broker started, in order of their names."""
    run_record: RunRecord | None = None
    """If it was asked for, and there is one."""


class Pardon(Message):
    """Operator -> broker: this learner's contributions are welcome again. Answered by DONE, also if they were."""

    tag = 56
    learner: Name


# -------------------------------------------------------------------------------------------------------------- relays


class Receipt(Message):
    """Relay -> worker, in answer to OFFER: all bytes are durable here, so they need not be sent again.

    It is not ACCEPTED: the contribution stays open until the home broker has it, and the final answer comes later.
    """

    tag = 70
    id: ContributionId


class RelayBeat(Message):
    """Relay -> broker, every heartbeat: that it is there. Answered by RELAY_ALIVE."""

    tag = 71
    facts: RelayFacts = RelayFacts()
    keys_sha256: Annotated[str, Field(max_length=64)] = ""
    """Of the allow-list that the relay has; empty = none."""


class RelayAlive(Message):
    """Broker -> relay: RELAY_BEAT was heard; and whom to let in, if that has changed."""

    tag = 72
    keys_sha256: Annotated[str, Field(max_length=64)] = ""
    """Of the allow-list; empty = the broker has no keys and lets everybody in."""
    keys: Annotated[tuple[KeyInfo, ...], Field(max_length=ALLOWED_MAX, fail_fast=True)] | None = None
    """The whole allow-list; None = it is the one that the relay has."""


# ----------------------------------------------------------------------------------------------------- hints and errors


class Hint(Message):
    """Broker -> everybody, events: something happened; ask if it matters to you.

    contribution: a row of `fragment` is pending on head `version` (for learners this is the cue)
    version: `version` of `fragment` is the head now
    settled: some contribution of `fragment` was rejected
    initialised: the run has a record now
    report: a figure came in
    beat: nothing new; sent every few seconds so that a gap in `seq` is seen
    """

    tag = 60
    broker_incarnation: Token
    seq: Count
    kind: Literal["contribution", "version", "settled", "initialised", "report", "beat"]
    fragment: FragmentId = 0
    version: Version = 0
    learner: Annotated[str, Field(max_length=64)] = ""


ErrorCode = Literal[
    "bad-message",  # the frame is no message, or no message for this channel or role
    "unknown-session",  # say HELLO (again)
    "not-initialised",  # the run has no record yet: wait, or INIT
    "not-found",  # no such blob, fragment or version
    "conflict",  # this id names other bytes already
    "damaged",  # the bytes do not have the digest that was announced, or an entry of the store is not what was written
    "broken-rule",  # a peer that follows the protocol cannot have sent this
    "too-large",  # over a limit that the text names
    "protocol",  # no common protocol version
    "run",  # another run is served here
    "manifest",  # another model
    "settings",  # a stated setting is not the run's
    "denied",  # the asker's key does not open this
    "quarantined",  # too many contributions of this learner were rejected in a row
    "retired",  # the incarnation that made what a relay hands over was replaced
    "internal",  # the broker's own fault
]

REFUSALS: Final = frozenset({"protocol", "run", "manifest", "settings", "denied", "quarantined"})
"""Codes that end a client: asking again unchanged cannot succeed."""


class Error(Message):
    """Broker -> client: what was wrong, where, and what to do."""

    tag = 61
    code: ErrorCode
    text: Text


MESSAGES: Final[dict[int, type[Message]]] = {
    cls.tag: cls
    for cls in (
        Hello, Welcome, Init, Initialised, Progress, Alive, Leave,
        Offer, Grant, Accepted, Expired, Merged, Rejected, Fenced, RetryAfter, Upload, Stored,
        Chunk, Credit, Fetch,
        AskVersion, VersionReply, AskHeads, Heads, AskHistory, History,
        Lease, Leased, List, Listing, Settle, Settled, Commit, Committed, Stale, Checkpoint,
        Shards, ShardsLeased, Report, Done, AskStatus, Status, Pardon,
        Hint, Error,
        Receipt, RelayBeat, RelayAlive,
    )
}  # fmt: skip


def pack(message: Message) -> bytes:
    """The header bytes of a message. Fields that have their default are left out."""
    packed: bytes = msgpack.packb([message.tag, message.model_dump(mode="python", exclude_defaults=True)])
    return packed


def unpack(header: bytes | memoryview) -> Message:
    """The message of some header bytes.

    Raises MessageError, with one sentence that names the fault, for any bytes that are no valid message.
    """
    if len(header) > HEADER_BYTES_MAX:
        raise MessageError(f"a header of {len(header)} bytes is over the limit of {HEADER_BYTES_MAX}")
    tally = _Tally()
    try:
        outer: Any = msgpack.unpackb(
            header,
            use_list=False,
            strict_map_key=False,
            raw=False,
            max_array_len=ARRAY_VALUES_MAX,
            max_map_len=MAP_ENTRIES_MAX,
            list_hook=tally.take_array,
            object_hook=tally.take_map,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MessageError(f"a header of {len(header)} bytes is no msgpack: {type(error).__name__}") from error
    if not (isinstance(outer, tuple) and len(outer) == 2 and type(outer[0]) is int and isinstance(outer[1], dict)):
        raise MessageError("a header is not the pair (tag, fields)")
    cls = MESSAGES.get(outer[0])
    if cls is None:
        raise MessageError(f"tag {outer[0]} is no message of protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}")
    try:
        return cls.model_validate(outer[1], strict=True)
    except (ValidationError, RecursionError) as error:
        raise MessageError(f"{cls.__name__}: {_first_fault(error)}") from error


class _Tally:
    """Counts the values of a header while it is read, and stops that before they fill the memory."""

    def __init__(self) -> None:
        self._num_values = 0

    def take_array(self, array: tuple[Any, ...]) -> tuple[Any, ...]:
        self._add(1 + len(array))
        return array

    def take_map(self, fields: dict[Any, Any]) -> dict[Any, Any]:
        self._add(MAP_VALUES + len(fields))
        return fields

    def _add(self, num: int) -> None:
        self._num_values += num
        if self._num_values > HEADER_VALUES_MAX:
            raise MessageError(f"a header holds more than {HEADER_VALUES_MAX} values")


def _first_fault(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return type(error).__name__
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(str(part)[:64] for part in fault['loc'])}: {fault['msg'][:200]}"
