"""What a version adds to the live parameters, prepared beside the training thread.

Under rebase it does not depend on them, so whoever builds a version can compute it, and the training thread adds it in
one pass over the fragment, without memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch

from isles.proto.codec.chunks import spans
from isles.workers.account import Account
from isles.workers.flat import FlatModel, Parted

CHUNK_VALUES: Final = 1 << 15
"""Values handled at a time: 128 KiB, so that three such chunks stay in a core's own cache."""


@dataclass(frozen=True, slots=True)
class Increment:
    """What applying one version adds to the live parameters of a fragment; it holds for one state of the account."""

    anchor: torch.Tensor
    """The account's, as is the residual: while both are the same tensors, they have the same values."""
    residual: torch.Tensor | None
    has_decoded: bool
    """Whether it contains what the learner's own contribution decodes to."""
    added: Parted

    def is_of(self, account: Account[torch.Tensor], *, is_own: bool) -> bool:
        """Whether the account is still as it was, and own work is subtracted if and only if that was expected."""
        is_same = self.anchor is account.anchor and self.residual is account.residual
        return is_same and self.has_decoded == is_own


def prepare(
    flat: FlatModel,
    fragment: int,
    account: Account[torch.Tensor] | None,
    theta_w: torch.Tensor,
    decode_own: Callable[[], torch.Tensor] | None,
) -> tuple[torch.Tensor | None, Increment | None]:
    """The own contribution in a version with values `theta_w` [num_values], decoded, or the increment that has it.

    Both are none of a version that the account holds already. There is no increment without an account, and if its rule
    asks for the live parameters. `account` may change meanwhile: the training thread has it.
    """
    account = None if account is None else replace(account)
    if account is not None and account.anchor is theta_w:
        return None, None
    decoded = None if decode_own is None else decode_own()
    if account is None or not account.is_rebased(is_own=decoded is not None):
        return decoded, None
    out = torch.empty_like(theta_w) if decoded is None else decoded
    added = flat.parted(fragment, increment_in(out, account, theta_w, decoded))
    return None, Increment(account.anchor, account.residual, decoded is not None, added)


def increment_in(
    out: torch.Tensor, account: Account[torch.Tensor], theta_w: torch.Tensor, decoded: torch.Tensor | None
) -> torch.Tensor:
    """`account.increment(theta_w, decoded)`, to the same bits, in memory that is there already: `out`, maybe `decoded`.

    All are [num_values] float32 on the host.
    """
    scratch = torch.empty(min(CHUNK_VALUES, theta_w.numel()), dtype=torch.float32)
    for first, last in spans(theta_w.numel(), CHUNK_VALUES):
        chunk = torch.sub(theta_w[first:last], account.anchor[first:last], out=scratch[: last - first])
        if decoded is not None:
            chunk += decoded[first:last]
        if account.residual is not None:
            chunk -= account.residual[first:last]
        out[first:last] = chunk
    return out
