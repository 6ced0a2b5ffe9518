"""What must be true of a run at every moment, whatever happened to its processes: the laws of the simulated worlds.

`Laws` is shown everything a broker makes durable, keeps its own books of exact integers beside it, and raises
AssertionError as soon as the two differ. Each look costs the same however long the run already is:

    a HELLO           the incarnations of that one process
    a contribution    its row and its bytes, which are kept here until its fate is decided
    a rejection       the reason, and whether the payload had rotted
    a version         its number, its ingredients, and all lanes of its fragment before and after
    a lease           the epochs in it
    a blob deleted    what that blob was good for

All of the store is looked at whenever a broker starts, and all of the books once more at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from isles.brokers import versions
from isles.brokers import vocabulary as broker
from isles.brokers.store.index import Index
from isles.ops.simulation.desk import POISON, Values, make_version
from isles.ops.simulation.learner_actor import LearnerActor
from isles.ops.simulation.values import (
    UP_QUANTUM,
    Lane,
    Pair,
    counted,
    is_once_each,
    missing,
    num_counted,
    ref_of,
)
from isles.proto.ids import ContributionId
from isles.proto.messages import HEADER_BYTES_MAX, Accepted, BlobRef, Hint, Leased, VersionInfo

RECENT_MAX: Final = 6
"""Blobs that are as good as new: about those of the newest version of each fragment."""


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
        self.num_versions_all = 0
        """Versions committed, of all fragments."""
        self.taken: dict[ContributionId, int] = {}
        """Everything that was ever offered: its lanes."""
        self.accepted: set[ContributionId] = set()
        self.rejected: set[ContributionId] = set()
        self.merged: set[ContributionId] = set()
        self.endangered: set[ContributionId] = set()
        """Those whose payload rotted before their fate was decided: all that may be rejected without poison."""
        self.rotted: set[str] = set()
        """Digests of all blobs that were ever damaged where they lay."""
        self.merged_by: set[str] = set()
        self.num_checkpoints = 0
        self.is_rotten: Callable[[str], bool] = lambda _: False
        """Whether the blob of a digest has been damaged where it lies."""
        self._index = index
        self._stored = stored
        self._increment = increment
        self._epochs: dict[int, int] = {}
        self._checkpoints: dict[int, list[int]] = {fragment: [0] for fragment in self.heads}
        self._needs: defaultdict[str, set[tuple[str, int, int]]] = defaultdict(set)
        """Digest -> what it is good for: ("update" or "state", fragment, version)."""
        self._pending: dict[ContributionId, str] = {}
        """Accepted contributions whose fate is open, and the digests of their payloads."""
        self._deltas: dict[ContributionId, Pair] = {}
        """What they had in them the moment they were accepted, whatever their bytes are later."""
        self._current: dict[tuple[str, str], str] = {}
        """(role, id) -> its current incarnation."""
        self._retired: set[tuple[str, str, str]] = set()

    # -------------------------------------------------------------------------------------------------- at every moment

    def see(self, instructions: Iterable[broker.Instruction]) -> None:
        """Looks at everything that has just become durable."""
        for instruction in instructions:
            match instruction:
                case broker.Send(message=message):
                    if isinstance(message, Accepted):
                        self._see_accepted(message.id)
                    elif isinstance(message, Leased):
                        self._see_leased(message.epochs)
                case broker.Publish(hint):
                    self._see_hint(hint)
                case broker.Log(event="version.checkpointed", fields=fields):
                    self._see_checkpoint(fields["fragment"], fields["version"])
                case broker.Log(event="client.joined", fields=fields):
                    self._see_joined(fields["role"], fields["id"], fields["incarnation"])
                case broker.DeleteBlob(blob):
                    self._see_deleted(blob.digest)

    def _see_leased(self, epochs: Mapping[int, int]) -> None:
        for fragment, epoch in epochs.items():
            assert epoch >= self._epochs.get(fragment, 0), f"the epoch of fragment {fragment} goes back"
            self._epochs[fragment] = epoch

    def _see_hint(self, hint: Hint) -> None:
        match hint.kind:
            case "contribution":
                row = self._index.row(hint.learner, hint.fragment)
                assert row is not None
                self._see_accepted(row.id)
            case "settled":
                self._see_rejected(hint.learner, hint.fragment)
            case "version":
                self._see_version(hint.fragment)

    def _see_accepted(self, accepted: ContributionId) -> None:
        if accepted in self.accepted:
            return
        self.accepted.add(accepted)
        row = self._index.row(accepted.learner, accepted.fragment)
        assert row is not None, f"{accepted} is accepted and not in the store"
        assert row.id == accepted, f"{accepted} is accepted and not in the store"
        assert ("worker", accepted.learner, accepted.incarnation) not in self._retired, f"{accepted} is of the past"
        self._pending[accepted] = row.contribution.blob.digest
        self._deltas[accepted] = Pair.decode(self._stored(row.contribution.blob))

    def _see_rejected(self, learner: str, fragment: int) -> None:
        row = self._index.row(learner, fragment)
        assert row is not None
        assert row.reason == POISON or row.id in self.endangered, f"{row.id} is rejected for nothing: {row.reason}"
        self.rejected.add(row.id)
        self._pending.pop(row.id, None)
        self._deltas.pop(row.id, None)

    def _see_version(self, fragment: int) -> None:
        before = self.heads[fragment].parameters
        found = self._index.versions(fragment, self.num_versions[fragment] + 1, 2, HEADER_BYTES_MAX)
        assert [info.version for info in found] == [self.num_versions[fragment] + 1], "versions are not contiguous"
        [head] = found
        assert head.recipe is not None
        ids = [ingredient.id for ingredient in head.recipe.ingredients]
        assert not self.merged.intersection(ids), "a contribution is merged twice"
        assert not self.rejected.intersection(ids), "a rejected contribution is merged"
        assert self.accepted.issuperset(ids), "a contribution is merged that was not accepted"
        _, made = make_version(self.heads[fragment], [self._deltas.pop(merged) for merged in ids])
        parameters = made.parameters
        assert ref_of(parameters).digest == head.parameters_sha256, "the recipe does not give the version"
        assert is_once_each(parameters.lanes), "an item counts more than once, or less than it did"
        assert not missing(before.lanes, parameters.lanes), "an item that was in the model is no longer"
        assert head.tokens_total == num_counted(parameters.lanes), "tokens and items differ"
        self.merged.update(ids)
        self.merged_by.update(merged.learner for merged in ids)
        self.num_versions[fragment] = head.version
        self.num_versions_all += 1
        self.heads[fragment] = made
        self._note_needs(head)

    # ---------------------------------------------------------------------------------------------------- incarnations

    def _see_joined(self, role: str, name: str, incarnation: str) -> None:
        """Of two incarnations the one is current whose first HELLO was taken later, and the other never again."""
        if role == "operator" or self._current.get((role, name)) == incarnation:
            return
        assert (role, name, incarnation) not in self._retired, f"{role} {name}: a retired incarnation is current again"
        if (before := self._current.get((role, name))) is not None:
            self._retired.add((role, name, before))
        self._current[role, name] = incarnation

    def check_fenced(self, role: str, name: str, incarnation: str) -> None:
        """Whoever is told that it was replaced, was."""
        assert (role, name, incarnation) in self._retired, f"{role} {name} is fenced, and nobody has replaced it"

    def check_given_up(self, name: str, reason: str) -> None:
        """An outer gives up only where it cannot go on: a payload that pends can be rejected, if it has rotted."""
        missed = [digest for digest in self.rotted if digest[:12] in reason]
        assert missed, f"{name} gives up, and nothing that it misses has rotted: {reason}"
        for digest in missed:
            pending = self._pending_with(digest)
            assert not pending, f"{name} gives up instead of rejecting {pending[0]}: {reason}"

    # -------------------------------------------------------------------------------------------- what must not be lost

    def _note_needs(self, head: VersionInfo) -> None:
        assert head.update is not None
        assert head.recipe is not None
        need = ("update", head.fragment, head.version)
        self._needs[head.update.digest].add(need)
        for ingredient in head.recipe.ingredients:
            self._needs[ingredient.digest].add(need)
            self._pending.pop(ingredient.id, None)

    def _pending_with(self, digest: str) -> list[ContributionId]:
        """Contributions whose fate is open and that have this payload: equal work has equal bytes."""
        return [one for one, payload in self._pending.items() if payload == digest]

    def recent_digests(self) -> list[str]:
        """Of what pends and of what was needed last: of the newest versions, updates, payloads and states."""
        return [*list(self._needs)[-RECENT_MAX:], *self._pending.values()]

    def note_rot(self, digest: str) -> None:
        """A blob is damaged where it lies."""
        self.rotted.add(digest)
        self.endangered.update(self._pending_with(digest))

    def _see_checkpoint(self, fragment: int, version: int) -> None:
        info = self._index.version(fragment, version)
        assert info is not None
        if version not in self._checkpoints[fragment]:
            self.num_checkpoints += 1
            self._checkpoints[fragment].append(version)
        for blob in versions.state_blobs(info):
            self._needs[blob.digest].add(("state", fragment, version))

    def _see_deleted(self, digest: str) -> None:
        pending = self._pending_with(digest)
        assert not pending, f"the payload of {pending[0]}, which is pending, is deleted"
        for kind, fragment, version in self._needs.pop(digest, ()):
            newest = max(self._checkpoints[fragment])
            is_covered = version <= newest if kind == "update" else version < newest
            assert is_covered, f"the {kind} of version {version} is deleted, which a new outer needs"

    def check_store(self) -> None:
        """Everything that the index says is there can be read, but for what rots; for the start of a broker."""
        for digest in sorted(self._index.digests()):
            blob = self._index.blob(digest)
            assert blob is not None
            if not self.is_rotten(digest):
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
