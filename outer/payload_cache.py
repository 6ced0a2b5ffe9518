"""Payloads that passed the screen, kept for the merge as far as a budget goes; the others are fetched again. Pure."""

from __future__ import annotations

from typing import Final

from isles.proto.ids import ContributionId

Payload = bytes | bytearray

ANY_CODEC: Final = "fp32"
"""No codec makes longer payloads: bounds those of older settings, too."""


class PayloadCache:
    """Bytes of contributions that are waiting for their merge, of all fragments together.

    First come, first kept: each is used exactly once, so none is worth more than another.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._payloads: dict[ContributionId, Payload] = {}
        self.bytes_held = 0
        """Of all payloads; never above the budget."""

    def put(self, contribution_id: ContributionId, payload: Payload) -> bool:
        """Keeps a payload if there is room; whether it was kept."""
        self.drop(contribution_id)
        if self.bytes_held + len(payload) > self._bytes_max:
            return False
        self._payloads[contribution_id] = payload
        self.bytes_held += len(payload)
        return True

    def get(self, contribution_id: ContributionId) -> Payload | None:
        """A payload that was kept."""
        return self._payloads.get(contribution_id)

    def drop(self, contribution_id: ContributionId) -> None:
        """Lets go of a payload, if it was kept."""
        payload = self._payloads.pop(contribution_id, None)
        if payload is not None:
            self.bytes_held -= len(payload)
