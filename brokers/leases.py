"""Which outer merges which fragment. Pure.

The holder and the epoch are in the index; the time is not, so after a restart of the broker a lease that was held
continues for one lease time. An epoch grows exactly when the holder changes, and a holder is one incarnation.
"""

from __future__ import annotations

from isles.brokers.store.index import Index, StoredLease
from isles.proto.messages import LeaseInfo


class Leases:
    """The leases of outers on fragments."""

    def __init__(self, index: Index, *, lease_seconds: float, now: float) -> None:
        self._index = index
        self._lease_seconds = lease_seconds
        self._expires_at = dict.fromkeys(index.leases(), now + lease_seconds)

    def grant(
        self, fragments: tuple[int, ...], holder: str, incarnation: str, now: float
    ) -> tuple[dict[int, int], bool]:
        """Renews what is the asker's and gives it what is free: fragment -> epoch, and whether an epoch is new."""
        epochs: dict[int, int] = {}
        is_new = False
        for fragment in fragments:
            lease = self._index.lease(fragment)
            is_mine = lease is not None and (lease.holder, lease.incarnation) == (holder, incarnation)
            if lease is not None and not is_mine and not self._is_free(fragment, lease, now):
                continue
            epoch = lease.epoch if lease is not None else 0
            if lease is None or not is_mine or lease.is_released:
                is_new = is_new or not is_mine
                epoch = epoch if is_mine else epoch + 1
                self._index.put_lease(fragment, StoredLease(holder, incarnation, epoch))
            self._expires_at[fragment] = now + self._lease_seconds
            epochs[fragment] = epoch
        return epochs, is_new

    def _is_free(self, fragment: int, lease: StoredLease, now: float) -> bool:
        return lease.is_released or now >= self._expires_at.get(fragment, now)

    def epoch(self, fragment: int) -> int:
        """The newest epoch of a fragment; 0 before the first lease."""
        lease = self._index.lease(fragment)
        return 0 if lease is None else lease.epoch

    def release(self, holder: str, incarnation: str) -> None:
        """An outer goes on purpose: its fragments are free at once."""
        for fragment, lease in self._index.leases().items():
            if (lease.holder, lease.incarnation) == (holder, incarnation) and not lease.is_released:
                self._index.put_lease(fragment, StoredLease(holder, incarnation, lease.epoch, is_released=True))

    def release_older(self, holder: str, incarnation: str) -> None:
        """A newer incarnation of an outer is here: what the older ones held is free at once, since they are fenced."""
        for lease in list(self._index.leases().values()):
            if lease.holder == holder and lease.incarnation != incarnation:
                self.release(holder, lease.incarnation)

    def infos(self, now: float) -> tuple[LeaseInfo, ...]:
        """All leases, for people."""
        return tuple(
            LeaseInfo(
                fragment=fragment,
                holder=lease.holder,
                epoch=lease.epoch,
                expires_seconds=0.0 if lease.is_released else self._expires_at.get(fragment, now) - now,
            )
            for fragment, lease in self._index.leases().items()
        )
