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
from isles.proto.client import Fetched, FetchFailed, as_error
from isles.proto.clock import Clock, SystemClock
from isles.proto.codec import bound_bytes
from isles.proto.codec.table import CODEC_NAMES
from isles.proto.codec.torch_codec import decode
from isles.proto.connection import Connection, raise_if_refused
from isles.proto.errors import ManifestMismatchError, PayloadError, UnreachableError
from isles.proto.ids import FragmentId, Version
from isles.proto.manifest import Manifest
from isles.proto.messages import (
    AskHistory,
    AskVersion,
    BlobRef,
    History,
    Message,
    VersionInfo,
    VersionReply,
)
from isles.workers.flat import fit

_Reply = TypeVar("_Reply", bound=Message)

FETCHES_MAX: Final = 5
"""How often a fragment is asked for anew when what the answer named cannot be had: the store keeps the last few
versions, so one that moves on during a slow transfer is caught at the second try."""

PARAMETERS_CODEC: Final = "fp32"
"""Whole parameters are stored as they are."""

ASK_SECONDS: Final = 15.0
"""Longest wait for an answer of the broker that is not a blob: one that was restarted is back by then."""


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
        trained = self._trained()
        return sum(held.tokens_total for held in trained) / max(1, len(trained))

    @property
    def progress(self) -> float:
        """The global step as a share of the budget, in [0, 1]."""
        versions = sum(held.version for held in self._trained())
        return self.record.budget.progress(tokens_merged=self.tokens, rounds_committed=versions)

    def _trained(self) -> list[FragmentValues]:
        """All but a fragment of buffers, which comes last and may never change."""
        return [held for fragment, held in self.fragments.items() if fragment < self.record.sync.num_fragments]

    def tensors(self) -> dict[str, Tensor]:
        """Name -> values, in the shape and type of the model; a tied tensor stands under each of its names.

        Frozen tensors and the buffers that are not merged are not among them: they are no part of a version. All
        fragments must be held.
        """
        found: dict[str, Tensor] = {}
        types = {spec.name: spec.dtype for spec in self.manifest.tensors}
        for fragment in self.manifest.fragments:
            values = self.fragments[fragment.fragment_id].values
            for piece in self.manifest.slices(fragment.fragment_id):
                tensor = values[piece.start : piece.stop].view(piece.shape)
                found[piece.name] = fit(tensor, getattr(torch, types[piece.name]))
        return found | {alias: found[owner] for alias, owner in self.manifest.aliases.items() if owner in found}

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> None:
        """Copies the values into a model of the same names. Raises ManifestMismatchError if it is another model."""
        own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        own |= dict(model.named_buffers(remove_duplicate=False))
        for name, values in self.tensors().items():
            tensor = own.get(name)
            if tensor is None or tensor.shape != values.shape:
                what = "no such tensor" if tensor is None else f"the shape {tuple(tensor.shape)}"
                raise ManifestMismatchError(
                    f"tensor {name!r} of the run {self.record.run} has the shape {tuple(values.shape)}, the model "
                    f"here has {what}: build it from the run's task and task settings"
                )
            tensor.copy_(values)


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
        begin = held
        for _ in range(FETCHES_MAX):
            ask = AskVersion(fragment=fragment, base_version=None if begin is None else begin.version)
            reply = self._ask(ask, VersionReply, deadline)
            try:
                if begin is not None and reply.head.version == begin.version:
                    return replace(begin, tokens_total=reply.head.tokens_total)
                values = self._follow(begin, reply, deadline)
                return FragmentValues(reply.head.version, reply.head.tokens_total, values)
            except PayloadError as error:
                # The other way the next time: the broker may not know of what went wrong with this one.
                fault, begin = error, held if begin is None else None
        assert fault is not None
        raise fault

    def _snapshot(self, info: VersionInfo, deadline: float) -> Tensor:
        if info.parameters is None:
            raise PayloadError(f"the broker keeps no parameters of fragment {info.fragment}, version {info.version}")
        return _checked(self._fetch(info.parameters, info.fragment, deadline), info)

    def _follow(self, begin: FragmentValues | None, reply: VersionReply, deadline: float) -> Tensor:
        """Theta_w = Theta_v + the updates of v + 1 .. w, one after the other in float32, as the outer made them."""
        head = reply.head
        if reply.snapshot is not None:
            first, values = reply.snapshot.version, self._snapshot(reply.snapshot, deadline)
        elif begin is not None:
            first, values = begin.version, begin.values
        else:
            raise PayloadError(f"the broker has no way to version {head.version} of fragment {head.fragment}")
        if first + len(reply.updates) != head.version:
            raise PayloadError(
                f"the broker's way from version {first} of fragment {head.fragment} does not lead to {head.version}"
            )
        for update in reply.updates:
            values = values + self._fetch(update, head.fragment, deadline)
        return _checked(values, head) if reply.updates else values

    # --------------------------------------------------------------------------------------------------------- waiting

    def _ask(self, message: Message, kind: type[_Reply], deadline: float) -> _Reply:
        left = 0.0 if self._should_stop() else min(ASK_SECONDS, deadline - self._clock.now())
        return ask(self._connection, message, kind, left, address=self._address)

    def _fetch(self, blob: BlobRef, fragment: FragmentId, deadline: float) -> Tensor:
        num_values = self._manifest.fragments[fragment].num_values
        self._connection.fetch(blob, bytes_max=payload_bytes_max(num_values))
        while (left := deadline - self._clock.now()) > 0 and not self._should_stop():
            for news in self._connection.poll(left):
                raise_if_refused(news, self._address)
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
    raise PayloadError(f"the broker at {address} cannot answer {type(message).__name__}: {as_error(reply).text}")


def _checked(values: Tensor, info: VersionInfo) -> Tensor:
    """The values, if they are those of that version. Raises PayloadError."""
    if parameters_digest(values) != info.parameters_sha256:
        raise PayloadError(
            f"the parameters of fragment {info.fragment}, version {info.version}, are not those that the outer made: "
            "they were damaged in the store, or this build of torch adds differently"
        )
    return values


def payload_bytes_max(num_values: int) -> int:
    """Largest legal payload of a fragment, in bytes, in whichever codec: a run may have changed its codecs."""
    return max(bound_bytes(name, num_values) for name in CODEC_NAMES)


def parameters_digest(values: Tensor) -> str:
    """Hexadecimal SHA-256 of the little-endian bytes of float32 (values,), on any device."""
    return hashlib.sha256(values.detach().cpu().contiguous().numpy().astype("<f4", copy=False).data).hexdigest()
