"""The global parameters as anybody can have them from the broker, without being a learner.

Used by the evaluator after each cycle, and once by whoever writes the trained model to a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from isles.proto.agreement import RunRecord
from isles.proto.client import Fetched, FetchFailed
from isles.proto.clock import Clock, SystemClock
from isles.proto.codec import bound_bytes
from isles.proto.codec.torch_codec import decode
from isles.proto.connection import Connection, raise_if_refused
from isles.proto.errors import ManifestMismatchError, PayloadError, UnreachableError
from isles.proto.ids import FragmentId, Version
from isles.proto.manifest import Manifest
from isles.proto.messages import (
    AskHistory,
    AskVersion,
    BlobRef,
    Error,
    History,
    Message,
    VersionInfo,
    VersionReply,
)

_Reply = TypeVar("_Reply", bound=Message)

FETCHES_MAX: Final = 5
"""How often a fragment is asked for anew when what the answer named cannot be had: the store keeps the last few
versions, so one that moves on during a slow transfer is caught at the second try."""

ASK_SECONDS: Final = 15.0
"""Longest wait for an answer of the broker that is not a blob: one that was restarted is back by then."""

PARAMETERS_CODEC: Final = "fp32"
"""Whole parameters are stored as they are."""


@dataclass(frozen=True)
class FragmentValues:
    """One fragment at one version."""

    version: Version
    tokens_total: int
    """Tokens in this version since version 0."""
    values: Tensor
    """float32 (values,): the tensors of the fragment, flattened, in manifest order."""


class GlobalParameters:
    """A copy of the global parameters that follows them: each fetch brings it to the newest versions."""

    def __init__(self, record: RunRecord, fragments: Mapping[FragmentId, FragmentValues] | None = None) -> None:
        """Starts empty, or with these fragments. Raises MessageError if the record's manifest is none."""
        self.record = record
        self.manifest = Manifest.from_text(record.manifest)
        self.fragments: dict[FragmentId, FragmentValues] = dict(fragments or {})

    @property
    def versions(self) -> dict[FragmentId, Version]:
        """Fragment -> version held."""
        return {fragment: held.version for fragment, held in sorted(self.fragments.items())}

    @property
    def tokens(self) -> float:
        """Merged tokens of all learners: mean over fragments, since each fragment counts each token."""
        return sum(held.tokens_total for held in self.fragments.values()) / max(1, len(self.fragments))

    @property
    def progress(self) -> float:
        """The global step as a share of the budget, in [0, 1]."""
        versions = sum(held.version for held in self.fragments.values())
        return self.record.budget.progress(tokens_merged=self.tokens, rounds_committed=versions)

    def tensors(self) -> dict[str, Tensor]:
        """Name -> values, in the shape and type of the model; a tied tensor stands under each of its names.

        Frozen tensors and buffers are not among them: they are no part of a version. All fragments must be held.
        """
        found: dict[str, Tensor] = {}
        types = {spec.name: spec.dtype for spec in self.manifest.tensors}
        for fragment in self.manifest.fragments:
            values = self.fragments[fragment.fragment_id].values
            for piece in self.manifest.slices(fragment.fragment_id):
                tensor = values[piece.start : piece.stop].view(piece.shape)
                found[piece.name] = tensor.to(getattr(torch, types[piece.name]))
        return found | {alias: found[owner] for alias, owner in self.manifest.aliases.items() if owner in found}

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> None:
        """Copies the values into a model of the same names. Raises ManifestMismatchError if it is another model."""
        own = dict(model.named_parameters(remove_duplicate=False))
        for name, values in self.tensors().items():
            parameter = own.get(name)
            if parameter is None or parameter.shape != values.shape:
                what = "no such parameter" if parameter is None else f"the shape {tuple(parameter.shape)}"
                raise ManifestMismatchError(
                    f"parameter {name!r} of the run {self.record.run} has the shape {tuple(values.shape)}, the model "
                    f"here has {what}: build it from the run's task and task settings"
                )
            parameter.copy_(values)


class ParameterFetcher:
    """Brings versions over a connection, blocking. Belongs to the connection's thread."""

    def __init__(
        self,
        connection: Connection,
        record: RunRecord,
        *,
        address: str,
        timeout_seconds: float,
        clock: Clock | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`timeout_seconds` bounds each call of a method, `address` is for messages about it.

        Once `should_stop` says so, a call under way ends with UnreachableError.
        """
        self._connection = connection
        self._record = record
        self._manifest = Manifest.from_text(record.manifest)
        self._address = address
        self._timeout_seconds = timeout_seconds
        self._clock = clock or SystemClock()
        self._should_stop = should_stop

    def newest(self, held: GlobalParameters | None = None) -> GlobalParameters:
        """The newest version of every fragment, by updates from what is `held` where that is shorter.

        Raises UnreachableError after the timeout, PayloadError if what came is not what the broker says it is,
        RefusedError if the broker refuses this process.
        """
        deadline = self._clock.now() + self._timeout_seconds
        fragments = {
            fragment.fragment_id: self._newest(
                fragment.fragment_id, None if held is None else held.fragments.get(fragment.fragment_id), deadline
            )
            for fragment in self._manifest.fragments
        }
        return GlobalParameters(self._record, fragments)

    def first(self) -> GlobalParameters:
        """Version 0 of every fragment, which is kept for ever. Raises as `newest`."""
        deadline = self._clock.now() + self._timeout_seconds
        fragments = {}
        for fragment in self._manifest.fragments:
            ask = AskHistory(fragment=fragment.fragment_id, first=0, num_max=1)
            reply = self._ask(ask, History, deadline)
            if not reply.versions or reply.versions[0].version != 0:
                raise PayloadError(f"the broker at {self._address} has no version 0 of fragment {fragment.fragment_id}")
            info = reply.versions[0]
            fragments[fragment.fragment_id] = FragmentValues(0, info.tokens_total, self._snapshot(info, deadline))
        return GlobalParameters(self._record, fragments)

    # -------------------------------------------------------------------------------------------------- one fragment

    def _newest(self, fragment: FragmentId, held: FragmentValues | None, deadline: float) -> FragmentValues:
        fault: PayloadError | None = None
        for _ in range(FETCHES_MAX):
            ask = AskVersion(fragment=fragment, base_version=None if held is None else held.version)
            reply = self._ask(ask, VersionReply, deadline)
            try:
                if held is not None and reply.head.version == held.version:
                    return replace(held, tokens_total=reply.head.tokens_total)
                if reply.is_snapshot or held is None:
                    values = self._snapshot(reply.head, deadline)
                else:
                    values = self._follow(held.values, reply, deadline)
                return FragmentValues(reply.head.version, reply.head.tokens_total, values)
            except PayloadError as error:
                fault, held = error, None
        assert fault is not None
        raise fault

    def _snapshot(self, info: VersionInfo, deadline: float) -> Tensor:
        if info.parameters is None:
            raise PayloadError(f"the broker keeps no parameters of fragment {info.fragment}, version {info.version}")
        values = self._fetch(info.parameters, info.fragment, PARAMETERS_CODEC, deadline)
        return _checked(values, info)

    def _follow(self, values: Tensor, reply: VersionReply, deadline: float) -> Tensor:
        """Theta_w = Theta_v + the updates of v + 1 .. w, one after the other in float32, as the outer made them."""
        for update in reply.updates:
            values = values + self._fetch(update, reply.head.fragment, self._record.sync.codec_down, deadline)
        return _checked(values, reply.head)

    # --------------------------------------------------------------------------------------------------------- waiting

    def _ask(self, message: Message, kind: type[_Reply], deadline: float) -> _Reply:
        left = 0.0 if self._should_stop() else min(ASK_SECONDS, deadline - self._clock.now())
        return ask(self._connection, message, kind, left, address=self._address)

    def _fetch(self, blob: BlobRef, fragment: FragmentId, codec: str, deadline: float) -> Tensor:
        num_values = self._manifest.fragments[fragment].num_values
        self._connection.fetch(blob, bytes_max=bound_bytes(codec, num_values))
        while (left := deadline - self._clock.now()) > 0 and not self._should_stop():
            for news in self._connection.poll(left):
                raise_if_refused(news)
                if isinstance(news, FetchFailed) and news.blob.digest == blob.digest:
                    raise PayloadError(news.text)
                if isinstance(news, Fetched) and news.blob.digest == blob.digest:
                    return decode(news.data, num_values=num_values)
        raise UnreachableError(
            f"the parameters of fragment {fragment} did not arrive from {self._address} within "
            f"{self._timeout_seconds:g} s: is the broker still running, and is the link fast enough for "
            f"{blob.size_bytes} bytes?"
        )


def ask(
    connection: Connection, message: Message, kind: type[_Reply], timeout_seconds: float, *, address: str
) -> _Reply:
    """Asks and waits for a reply of this kind; a question nobody answered in time is not asked again later.

    Raises UnreachableError after the timeout, PayloadError for any other reply, RefusedError if the broker refuses
    this process.
    """
    try:
        reply = connection.ask_and_wait(message, timeout_seconds, address=address)
    finally:
        connection.client.forget(lambda asked: asked is message)
    if isinstance(reply, kind):
        return reply
    text = reply.text if isinstance(reply, Error) else f"with {type(reply).__name__}"
    raise PayloadError(f"the broker at {address} answered {type(message).__name__} {text}")


def _checked(values: Tensor, info: VersionInfo) -> Tensor:
    """The values, if they are those of that version. Raises PayloadError."""
    if parameters_digest(values) != info.parameters_sha256:
        raise PayloadError(
            f"the parameters of fragment {info.fragment}, version {info.version}, are not those that the outer made: "
            "they were damaged in the store, or this build of torch adds differently"
        )
    return values


def parameters_digest(values: Tensor) -> str:
    """Hexadecimal SHA-256 of the little-endian bytes of float32 (values,), on any device."""
    return hashlib.sha256(values.detach().cpu().contiguous().numpy().astype("<f4", copy=False).data).hexdigest()
