"""What the broker's pure cores need to know: limits, leases, retention."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from isles.proto.messages import CHUNK_BYTES, LEARNERS_MAX, SHARDS_MAX, Limits, Role
from isles.proto.timeouts import faults, times_of

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=1, lt=2**53)]


class RoutingSettings(BaseModel):
    """Limits, leases and retention: what the router asks of its clients and of itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    heartbeat_seconds: Seconds = Field(default=1.0, description="how often a worker sends PROGRESS, in seconds")
    learner_lease_seconds: Seconds = Field(
        default=10.0, description="a learner that is silent for this long, in seconds, is no longer live"
    )
    outer_lease_seconds: Seconds = Field(
        default=3.0, description="an outer that does not renew its lease for this long, in seconds, may be replaced"
    )
    session_idle_seconds: Seconds = Field(
        default=120.0, description="a session without a message for this long, in seconds, is forgotten"
    )
    beat_seconds: Seconds = Field(default=2.0, description="longest silence on the events channel, in seconds")
    flush_seconds: Seconds = Field(default=2.0, description="how often counters are written to the store, in seconds")
    versions_kept: Annotated[int, Field(ge=2, le=100_000)] = Field(
        default=8, description="how old a checkpoint has to be before what is older than it is deleted, in versions"
    )
    num_shards: Annotated[int, Field(ge=1, le=SHARDS_MAX)] = Field(
        default=1024, description="data shards that are leased to learners"
    )
    chunk_bytes: Annotated[int, Field(ge=4096, le=16 << 20)] = Field(
        default=CHUNK_BYTES, description="payload of one chunk, in bytes"
    )
    credit_chunks: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=8, description="chunks that may be under way in one transfer"
    )
    blob_bytes_max: Bytes = Field(default=4 << 30, description="largest single payload, in bytes")
    stored_bytes_max: Bytes | None = Field(
        default=None, description="most bytes of payloads in the store; without it only the disk bounds them"
    )
    disk_free_bytes_min: Annotated[int, Field(ge=0)] = Field(
        default=256 << 20, description="uploads wait while the disk has less than this free, in bytes"
    )
    uploads_per_client_max: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=32, description="uploads that one client may have open"
    )
    open_bytes_per_client_max: Bytes = Field(
        default=8 << 30, description="announced bytes of all uploads that one client has open"
    )
    downloads_per_client_max: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=64, description="fetches that one client may have open"
    )
    sessions_max: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=4096, description="sessions that may be open at once"
    )
    flight_bytes_max: Bytes = Field(
        default=1 << 30,
        description="memory for payloads on their way, half of it in and half of it out, in bytes; shared equally "
        "among the names of the allow-list, each with at least one chunk",
    )
    window_bytes_per_client_max: Bytes = Field(
        default=64 << 20,
        description="payload bytes on their way to one client beyond which each further fetch gets one chunk at a time",
    )
    sessions_per_key_max: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=1024, description="sessions that keys of one name may have open"
    )
    learners_per_key_max: Annotated[int, Field(ge=1, le=LEARNERS_MAX)] = Field(
        default=1024, description="learners that keys of one name may have in a run, those that are gone included"
    )
    uploads_per_key_max: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        default=8192, description="uploads that keys of one name may have open"
    )
    downloads_per_key_max: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        default=16_384, description="fetches that keys of one name may have open"
    )
    unused_bytes_per_key_max: Bytes = Field(
        default=64 << 30,
        description="stored bytes to which nothing refers yet, such as those of a first version, of keys of one name",
    )
    unused_blobs_per_key_max: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        default=16_384,
        description="stored payloads to which nothing refers yet, of keys of one name: each costs memory and a file, "
        "however short it is",
    )
    figures_bytes_per_key_max: Bytes = Field(
        default=256 << 20,
        description="figures, such as losses, that keys of one name may report in a run, in bytes; they are kept for "
        "ever",
    )
    starts_per_key_max: Annotated[int, Field(ge=1, le=1 << 40)] = Field(
        default=1_000_000,
        description="starts of processes with keys of one name that a run remembers: each of them retires the one "
        "before it for ever",
    )
    offers_per_minute_max: Annotated[int, Field(ge=1, le=1 << 30)] = Field(
        default=30_000, description="contributions that one learner with a key may offer in a minute"
    )
    relay_limit_factor: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=64,
        description="how many times the limits of one client and one key a relay has for its uploads and fetches: it "
        "speaks for all workers of a region",
    )
    quarantine_rejections: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=3, description="contributions of one learner, rejected in a row, that put it in quarantine; 0 = never"
    )
    quarantine_seconds: Annotated[float, Field(gt=0, le=31_536_000, allow_inf_nan=False)] = Field(
        default=600.0, description="how long nothing is taken from a learner in quarantine, in seconds"
    )
    upload_idle_seconds: Seconds = Field(
        default=60.0, description="an upload without a chunk for this long, in seconds, is dropped"
    )
    unused_blob_seconds: Seconds = Field(
        default=600.0, description="an uploaded blob that nothing refers to is deleted after this long, in seconds"
    )
    retry_seconds: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=1.0, description="how soon a client that was put off may ask again, in seconds"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if wrong := faults(times_of("broker", self)):
            raise ValueError(wrong[0])
        if self.open_bytes_per_client_max < self.blob_bytes_max:
            raise ValueError(
                f"open_bytes_per_client_max = {self.open_bytes_per_client_max} is under blob_bytes_max = "
                f"{self.blob_bytes_max}, so the largest payload could never come: raise the first or lower the second"
            )
        if self.flight_bytes_max < 4 * self.credit_chunks * self.chunk_bytes:
            raise ValueError(
                f"flight_bytes_max = {self.flight_bytes_max} holds less than two transfers each way of credit_chunks = "
                f"{self.credit_chunks} times chunk_bytes = {self.chunk_bytes}: raise the first"
            )
        return self

    def times(self, role: Role) -> int:
        """How many times the limits of one client and one key a process of this role has."""
        return self.relay_limit_factor if role == "relay" else 1

    @property
    def limits(self) -> Limits:
        """What a client is told of these settings."""
        return Limits(
            chunk_bytes=self.chunk_bytes,
            credit_chunks=self.credit_chunks,
            heartbeat_seconds=self.heartbeat_seconds,
            learner_lease_seconds=self.learner_lease_seconds,
            outer_lease_seconds=self.outer_lease_seconds,
        )
