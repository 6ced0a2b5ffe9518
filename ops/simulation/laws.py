"""What must be true of a run at every moment, whatever happened to its processes: the laws of the simulated worlds.

`Laws` is shown everything a broker makes durable, keeps its own books of exact integers beside it, and raises
AssertionError as soon as the two differ. Each look costs the same however long the run already is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from isles.brokers import versions
from isles.brokers import vocabulary as broker
from isles.brokers.store.index import Index
from isles.ops.simulation.desk import Values, make_version, ref_of
from isles.ops.simulation.learner_actor import LearnerActor
from isles.ops.simulation.values import (
    UP_QUANTUM,
    Lane,
    Pair,
    counted,
    is_once_each,
    missing,
    num_counted,
)
from isles.proto.ids import ContributionId
from isles.proto.messages import HEADER_BYTES_MAX, Accepted, BlobRef, Hint, Leased, VersionInfo


class Laws:
    """The books of one world."""

    def __init__(
        self,
        num_fragments: int,
        index: Index,
        stored: Callable[[BlobRef], bytes],
        increment: Callable[[Lane, int], int],
    ) -> None:
        """`stored` reads a blob; `increment` says what an inner step on an item adds to a fragment."""
        self.heads = dict.fromkeys(range(num_fragments), Values())
        """Fragment -> state of the newest version."""
        self.num_versions = dict.fromkeys(self.heads, 0)
        self.taken: dict[ContributionId, int] = {}
        """Everything that was ever offered: its lanes."""
        self.accepted: set[ContributionId] = set()
        self.rejected: set[ContributionId] = set()
        self.merged: set[ContributionId] = set()
        self.merged_by: set[str] = set()
        self.num_checkpoints = 0
        self._index = index
        self._stored = stored
        self._increment = increment
        self._epochs: dict[int, int] = {}
        self._checkpoints: dict[int, list[int]] = {fragment: [0] for fragment in self.heads}
        self._needs: defaultdict[str, set[tuple[str, int, int]]] = defaultdict(set)
        """Digest -> what it is good for: ("update" or "state", fragment, version)."""
        self._pending: dict[str, ContributionId] = {}
        """Digests of the payloads of accepted contributions whose fate is open."""

    @property
    def num_versions_all(self) -> int:
        """Versions committed, of all fragments."""
        return sum(self.num_versions.values())

    # -------------------------------------------------------------------------------------------------- at every moment

    def see(self, instructions: Iterable[broker.Instruction]) -> None:
        """Looks at everything that has just become durable."""
        for instruction in instructions:
            match instruction:
                case broker.Send(message=Accepted(id=accepted)):
                    self._see_accepted(accepted)
                case broker.Send(message=Leased(epochs=epochs)):
                    for fragment, epoch in epochs.items():
                        assert epoch >= self._epochs.get(fragment, 0), f"the epoch of fragment {fragment} goes back"
                        self._epochs[fragment] = epoch
                case broker.Publish(hint=Hint(kind="settled", fragment=fragment, learner=learner)):
                    row = self._index.row(learner, fragment)
                    assert row is not None
                    self.rejected.add(row.id)
                    self._pending.pop(row.contribution.blob.digest, None)
                case broker.Publish(hint=Hint(kind="version", fragment=fragment)):
                    self._see_version(fragment)
                case broker.Log(event="version.checkpointed", fields=fields):
                    self._see_checkpoint(fields["fragment"], fields["version"])
                case broker.DeleteBlob(blob):
                    self._see_deleted(blob.digest)

    def _see_accepted(self, accepted: ContributionId) -> None:
        if accepted in self.accepted:
            return
        self.accepted.add(accepted)
        row = self._index.row(accepted.learner, accepted.fragment)
        assert row is not None, f"{accepted} is accepted and not in the store"
        assert row.id == accepted, f"{accepted} is accepted and not in the store"
        if row.state == "pending":
            self._pending[row.contribution.blob.digest] = accepted

    def _see_version(self, fragment: int) -> None:
        before = self.heads[fragment].parameters
        found = self._index.versions(fragment, self.num_versions[fragment] + 1, 2, HEADER_BYTES_MAX)
        assert [info.version for info in found] == [self.num_versions[fragment] + 1], "versions are not contiguous"
        [head] = found
        assert head.recipe is not None
        ids = [ingredient.id for ingredient in head.recipe.ingredients]
        assert not self.merged.intersection(ids), "a contribution is merged twice"
        assert not self.rejected.intersection(ids), "a rejected contribution is merged"
        blobs = [BlobRef(digest=one.digest, size_bytes=one.size_bytes) for one in head.recipe.ingredients]
        _, made = make_version(self.heads[fragment], [Pair.decode(self._stored(blob)) for blob in blobs])
        parameters = made.parameters
        assert ref_of(parameters).digest == head.parameters_sha256, "the recipe does not give the version"
        assert is_once_each(parameters.lanes), "an item counts more than once, or less than it did"
        assert not missing(before.lanes, parameters.lanes), "an item that was in the model is no longer"
        assert head.tokens_total == num_counted(parameters.lanes), "tokens and items differ"
        self.merged.update(ids)
        self.merged_by.update(merged.learner for merged in ids)
        self.num_versions[fragment] = head.version
        self.heads[fragment] = made
        self._note_needs(head, blobs)

    # -------------------------------------------------------------------------------------------- what must not be lost

    def _note_needs(self, head: VersionInfo, payloads: list[BlobRef]) -> None:
        assert head.update is not None
        for blob in (head.update, *payloads):
            self._needs[blob.digest].add(("update", head.fragment, head.version))
        for blob in payloads:
            self._pending.pop(blob.digest, None)

    def _see_checkpoint(self, fragment: int, version: int) -> None:
        info = self._index.version(fragment, version)
        assert info is not None
        if version not in self._checkpoints[fragment]:
            self.num_checkpoints += 1
            self._checkpoints[fragment].append(version)
        for blob in versions.state_blobs(info):
            self._needs[blob.digest].add(("state", fragment, version))

    def _see_deleted(self, digest: str) -> None:
        assert digest not in self._pending, f"the payload of {self._pending[digest]}, which is pending, is deleted"
        for kind, fragment, version in self._needs.pop(digest, ()):
            newest = max(self._checkpoints[fragment])
            is_covered = version <= newest if kind == "update" else version < newest
            assert is_covered, f"the {kind} of version {version} is deleted, which a new outer needs"

    def check_store(self) -> None:
        """Everything that the index says is there can be read; for the start of a broker."""
        for digest in sorted(self._index.digests()):
            blob = self._index.blob(digest)
            assert blob is not None
            self._stored(blob)

    # ------------------------------------------------------------------------------------------------------- at the end

    def check_end(self, learners: Iterable[LearnerActor], num_losses: int) -> None:
        """What must be true once nothing is open, pending or unmerged.

        `num_losses` counts crashes and resets of learners: each may have rounded half a quantum away.
        """
        learners = list(learners)
        for fragment, state in self.heads.items():
            for learner in learners:
                lost = missing(learner.worked[fragment], state.parameters.lanes)
                assert not lost, f"work of {learner.learner} is lost: {lost[:5]}"
            self._check_units(fragment, learners, num_losses)
        for accepted in sorted(self.accepted):
            is_settled = accepted in self.merged or accepted in self.rejected
            assert is_settled, f"{accepted} was accepted, and has come to no end"
            if accepted not in self.rejected:
                lost = missing(self.taken[accepted], self.heads[accepted.fragment].parameters.lanes)
                assert not lost, f"{accepted} was accepted, and its items {lost[:5]} are in no version"

    def _check_units(self, fragment: int, learners: list[LearnerActor], num_losses: int) -> None:
        """x(Theta) + remainder - sum of x(U) = sum of the counted items, but for what crashes and resets round away."""
        parameters, remainder = self.heads[fragment].parameters, self.heads[fragment].remainder
        unmerged = sum(learner.account(fragment).x for learner in learners)
        wanted = sum(self._increment(lane, fragment) for lane in counted(parameters.lanes))
        gap = abs(parameters.x + remainder.x - unmerged - wanted)
        assert gap <= num_losses * UP_QUANTUM // 2, f"{gap} units of fragment {fragment} are made from nothing or lost"
