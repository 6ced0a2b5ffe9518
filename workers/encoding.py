"""From a learner's account to the contribution that it offers: the heavy part of contributing. Needs no connection."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from isles.proto.agreement import SyncSettings
from isles.proto.codec.torch_codec import encode_with_stats
from isles.proto.codec_names import CodecName
from isles.proto.manifest import codecs_of
from isles.proto.messages import BlobRef, Contribution
from isles.workers.account import Account
from isles.workers.flat import FlatModel
from isles.workers.orders import TakeAccount


@dataclass(frozen=True, slots=True)
class Encode:
    """Make the payload of this account and offer it."""

    take: TakeAccount
    account: Account[torch.Tensor]
    """A snapshot."""
    theta: torch.Tensor
    """A copy of the live parameters, [num_values] float32 on the host; overwritten with the account, and given back
    when the payload is made."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A contribution and its bytes."""

    contribution: Contribution
    payload: bytes


def encode_account(order: Encode, flat: FlatModel, sync: SyncSettings) -> Encoded | None:
    """The contribution of an account, with the norms that it had before it was quantised; None if it decodes to zeros.

    Raises NonFiniteError if a value is NaN or infinite, RangeError if one is too large for the run's codec.
    """
    fragment = order.take.fragment
    codec = codecs_of(flat.fragments[fragment], sync).up
    unmerged = contribution_in(order.theta, order.account, order.theta)
    encoded = encode_with_stats(codec, unmerged)
    if encoded.is_zero:
        return None
    norms = [
        torch.linalg.vector_norm(unmerged[start:stop], dtype=torch.float64) for start, stop in flat.bounds(fragment)
    ]
    return Encoded(_contribution(order.take, codec, encoded.payload, norms), encoded.payload)


def contribution_in(out: torch.Tensor, account: Account[torch.Tensor], theta: torch.Tensor) -> torch.Tensor:
    """`account.contribution(theta)`, to the same bits, in memory that is there already: `out`, which may be `theta`.

    A fragment of fresh memory would cost as much time as quantising it.
    """
    torch.sub(account.anchor, theta, out=out)
    return out if account.residual is None else out.add_(account.residual)


def _contribution(take: TakeAccount, codec: CodecName, payload: bytes, norms: list[torch.Tensor]) -> Contribution:
    return Contribution(
        id=take.id,
        base_version=take.base_version,
        blob=BlobRef(digest=hashlib.sha256(payload).hexdigest(), size_bytes=len(payload)),
        codec=codec,
        tokens=take.tokens,
        steps=take.steps,
        seconds=take.seconds,
        norms=tuple(torch.stack(norms).tolist()),
        cursor=dict(take.cursor),
    )
