"""What is kept, and what is answered from it: the books of one run. Pure rules over an index.

Each function here is called inside a transaction of its caller, and its answer is sent only after that transaction is
durable. So an answer never promises what a crash could take back.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from isles.brokers.store.index import Commitment, Index, StoredRow
from isles.brokers.versions import (
    UPDATES_MAX,
    blob_fault,
    let_go,
    newest_checkpoint,
    num_since_checkpoint,
    version_owner,
)
from isles.proto.agreement import RunRecord
from isles.proto.errors import MessageError
from isles.proto.ids import ContributionId
from isles.proto.manifest import Manifest
from isles.proto.messages import (
    COUNT_MAX,
    HEADER_BYTES_MAX,
    LEARNERS_MAX,
    Accepted,
    Commit,
    Committed,
    Contribution,
    Error,
    Expired,
    Fenced,
    Init,
    Initialised,
    Listing,
    Merged,
    Message,
    Recipe,
    Rejected,
    Row,
    Settle,
    Stale,
    VersionInfo,
)

TEXT_MAX: Final = 1000
"""Characters of another's words that are repeated in an answer."""
LISTING_BYTES_MAX: Final = HEADER_BYTES_MAX // 2
"""Of the contributions in one LISTING, which a COMMIT then repeats; those that are left out come with the next one."""
RECIPE_BYTES_MAX: Final = HEADER_BYTES_MAX - (64 << 10)
"""So that a version with its recipe fits a header."""

STORE_NAME = "store_name"
RUN_RECORD = "run_record"
INITIALISER = "initialiser"
NUM_PARAMETERS = "num_parameters"
EXPIRED_COUNTER = "contributions_expired"
REJECTED_COUNTER = "contributions_rejected"
BYTES_UP_COUNTER = "bytes_up"


# ------------------------------------------------------------------------------------------------------- incarnations


def is_retired(index: Index, role: str, name: str, incarnation: str) -> bool:
    """The fence: whether a newer incarnation of this process has been seen. Never undone."""
    return index.is_retired(role, name, incarnation)


def make_current(index: Index, role: str, name: str, incarnation: str) -> bool:
    """From now on every other incarnation of this process is refused; whether it was not current before."""
    if index.current_incarnation(role, name) == incarnation:
        return False
    index.put_current_incarnation(role, name, incarnation)
    return True


# ---------------------------------------------------------------------------------------------------------------- run


def store_name(index: Index, incarnation: str) -> str:
    """What tells this store from all others: the random name of the first broker process that opened it."""
    if index.value(STORE_NAME) is None:
        index.put_value(STORE_NAME, incarnation.encode())
    return (index.value(STORE_NAME) or b"").decode()


def run_record(index: Index) -> RunRecord | None:
    """The record of the run, once it has one."""
    found = index.value(RUN_RECORD)
    return None if found is None else RunRecord.model_validate_json(found)


def init(index: Index, message: Init, *, initialiser: str, unix: float) -> Message:
    """The first writer makes the run, atomically; everybody later learns that it exists."""
    if index.value(RUN_RECORD) is not None:
        return Initialised(is_mine=index.value(INITIALISER) == initialiser.encode())
    record = message.run_record
    try:
        manifest = Manifest.from_text(record.manifest)
    except MessageError as error:
        return Error(code="manifest", text=str(error)[:TEXT_MAX])
    if fault := _init_fault(index, message, manifest):
        return Error(code="broken-rule", text=fault)
    index.put_value(RUN_RECORD, record.model_dump_json().encode())
    index.put_value(INITIALISER, initialiser.encode())
    index.put_value(NUM_PARAMETERS, str(manifest.num_values).encode())
    for info in message.versions:
        assert info.parameters is not None
        first = VersionInfo(
            fragment=info.fragment,
            version=0,
            parameters_sha256=info.parameters_sha256,
            parameters=info.parameters,
            committed_unix=unix,
        )
        index.put_version(first, Commitment("", 0, 0, 0.0, 0))
        index.add_reference(info.parameters.digest, version_owner(info.fragment, 0))
    return Initialised(is_mine=True)


def _init_fault(index: Index, message: Init, manifest: Manifest) -> str | None:
    record = message.run_record
    if manifest.digest != record.manifest_digest:
        return f"INIT: the manifest has digest {manifest.digest[:12]}, not {record.manifest_digest[:12]}"
    num_fragments = manifest.num_parameter_fragments
    if num_fragments != record.sync.num_fragments:
        return f"INIT: the manifest has P = {num_fragments}, sync.num_fragments is {record.sync.num_fragments}"
    wanted = list(range(len(manifest.fragments)))
    if [info.fragment for info in message.versions] != wanted:
        return f"INIT: version 0 of each of the fragments 0..{len(wanted) - 1} is needed, in order"
    for info in message.versions:
        if info.version != 0 or info.parameters is None:
            return f"INIT: fragment {info.fragment} has version {info.version} or no parameters"
        if fault := blob_fault(index, info.parameters):
            return f"INIT: {fault}"
    return None


# ------------------------------------------------------------------------------------------------------ contributions


def is_answered(index: Index, contribution_id: ContributionId) -> bool:
    """The row kept for ever: whether this number, or a later one, was answered to this incarnation."""
    answered = index.answered(contribution_id.learner, contribution_id.fragment)
    return answered is not None and answered[0] == contribution_id.incarnation and contribution_id.number <= answered[1]


def has_pending_row(index: Index, learner: str, fragment: int) -> bool:
    """Whether the fate of this learner's last accepted contribution to the fragment is still open."""
    row = index.row(learner, fragment)
    return row is not None and row.state == "pending"


def is_expired(head: int, base_version: int, horizon_versions: int) -> bool:
    """Whether a contribution was measured from parameters that are too old to be useful."""
    return head - base_version > horizon_versions


def judge_offer(index: Index, contribution: Contribution, *, horizon_versions: int) -> Message | None:
    """The answer to an OFFER whose upload is not under way; None if its bytes are wanted."""
    if (answer := _judge(index, contribution)) is not None:
        return answer
    head = index.head_version(contribution.id.fragment)
    if head is None:
        return Error(code="not-found", text=f"there is no fragment {contribution.id.fragment} in this run")
    if contribution.base_version > head:
        return Error(
            code="broken-rule",
            text=f"contribution {contribution.id} has base version {contribution.base_version}, and the newest version "
            f"is {head}: was the store replaced by an older one?",
        )
    if is_expired(head, contribution.base_version, horizon_versions):
        _put_answered(index, contribution.id)
        index.add_to_counter(EXPIRED_COUNTER, 1)
        return Expired(id=contribution.id, head=head)
    return None


def accept(index: Index, contribution: Contribution, *, unix: float) -> Message:
    """Makes a contribution whose bytes are durable the pending row. ACCEPTED, or why not."""
    if (answer := _judge(index, contribution)) is not None:
        return answer
    learner, fragment = contribution.id.learner, contribution.id.fragment
    index.put_blob(contribution.blob, unix)
    index.drop_references(_row_owner(learner, fragment))
    index.add_reference(contribution.blob.digest, _row_owner(learner, fragment))
    index.put_row(StoredRow(contribution))
    _put_answered(index, contribution.id)
    index.add_to_counter(BYTES_UP_COUNTER, contribution.blob.size_bytes)
    index.add_accepted(learner, fragment, contribution.tokens)
    return Accepted(id=contribution.id)


def _judge(index: Index, contribution: Contribution) -> Message | None:
    contribution_id = contribution.id
    if is_retired(index, "worker", contribution_id.learner, contribution_id.incarnation):
        return Fenced()
    if is_answered(index, contribution_id):
        return _answer_already_given(index, contribution)
    if has_pending_row(index, contribution_id.learner, contribution_id.fragment):
        return Error(
            code="broken-rule",
            text=f"contribution {contribution_id} comes while the fate of the one before it is open: wait for it",
        )
    return None


def _put_answered(index: Index, contribution_id: ContributionId) -> None:
    learner, fragment, incarnation, number = contribution_id
    index.put_answered(learner, fragment, incarnation, number)


def _answer_already_given(index: Index, contribution: Contribution) -> Message:
    contribution_id = contribution.id
    row = index.row(contribution_id.learner, contribution_id.fragment)
    if row is not None and row.id == contribution_id:
        if row.contribution.blob != contribution.blob:
            text = f"contribution {contribution_id} is stored with other bytes: an id never names two payloads"
            return Error(code="conflict", text=text)
        return row_answer(row)
    answered = index.answered(contribution_id.learner, contribution_id.fragment)
    head = index.head_version(contribution_id.fragment)
    if head is not None and answered is not None and answered[1] == contribution_id.number:
        return Expired(id=contribution_id, head=head)
    return Error(code="broken-rule", text=f"contribution {contribution_id} comes after a later one was answered")


def row_answer(row: StoredRow) -> Message:
    """What the learner of a row is told when it offers the row's contribution again."""
    if row.state == "merged":
        return Merged(id=row.id, version=row.settled_in or 0)
    if row.state == "rejected":
        return Rejected(id=row.id, reason=row.reason)
    return Accepted(id=row.id)


# ------------------------------------------------------------------------------------------------------------ merging


def listing(index: Index, fragment: int, damaged: AbstractSet[str] = frozenset()) -> Listing | None:
    """What one round needs, but for the learners; None if there is no such fragment."""
    head = index.head(fragment)
    if head is None:
        return None
    pending = _that_fit([row.contribution for row in index.pending(fragment)])
    checkpoint = newest_checkpoint(index, fragment, head.version, damaged)
    if checkpoint is not None:
        checkpoint = checkpoint.changed(recipe=None)
    return Listing(head=head, pending=tuple(pending), learners=(), checkpoint=checkpoint)


def _that_fit(pending: list[Contribution]) -> list[Contribution]:
    """As many as one LISTING can hold, the oldest bases first, in order of their ids."""
    fitting: list[Contribution] = []
    bytes_left = LISTING_BYTES_MAX
    for contribution in sorted(pending, key=lambda one: (one.base_version, one.id)):
        bytes_left -= contribution_bytes(len(contribution.norms)) + 12 * len(contribution.cursor)
        if (fitting and bytes_left < 0) or len(fitting) == LEARNERS_MAX:
            break
        fitting.append(contribution)
    return sorted(fitting, key=lambda one: one.id)


def settle(index: Index, message: Settle) -> list[StoredRow]:
    """Rejects what is pending with exactly these ids; a repeated SETTLE finds nothing to do. Returns the new rows."""
    rejected = []
    for rejection in message.rejections:
        row = index.row(rejection.id.learner, message.fragment)
        if row is None or row.id != rejection.id or row.state != "pending":
            continue
        rejected.append(StoredRow(row.contribution, "rejected", None, rejection.reason))
        index.put_row(rejected[-1])
        index.drop_references(_row_owner(row.id.learner, row.id.fragment))
        index.add_to_counter(REJECTED_COUNTER, 1)
    return rejected


def row_fault(index: Index, recipe: Recipe) -> str | None:
    """The states in COMMIT: why what a version consumes may not be merged; None if all of it is pending."""
    for ingredient in recipe.ingredients:
        row = index.row(ingredient.id.learner, ingredient.id.fragment)
        if row is None or row.id != ingredient.id:
            return f"contribution {ingredient.id} is not in the store"
        if row.state != "pending":
            return f"contribution {ingredient.id} is {row.state}"
        if row.contribution.blob.digest != ingredient.digest:
            return f"contribution {ingredient.id} has other bytes than the recipe says"
    return None


def commit(
    index: Index,
    message: Commit,
    *,
    epoch: int,
    versions_kept: int,
    unix: float,
    damaged: AbstractSet[str] = frozenset(),
) -> Message:
    """Compare and set: version `base_version + 1`, if nothing it stands on has changed. `epoch` is the newest one."""
    repeated = index.version_of_commit(message.commit_id)
    if repeated is not None:
        return Committed(fragment=repeated[0], version=repeated[1], is_repeat=True)
    if message.epoch < epoch:
        return Fenced(epoch=epoch)
    head = index.head(message.fragment)
    if head is None or epoch == 0 or message.epoch > epoch:
        return Error(code="broken-rule", text=f"COMMIT of fragment {message.fragment} without a LEASE on it")
    if head.version != message.base_version:
        return Stale(fragment=message.fragment, head=head.version, reason=f"the head is {head.version}")
    if error := _commit_error(message, num_since_checkpoint(index, message.fragment, head.version)):
        return error
    if fault := row_fault(index, message.recipe):
        return Stale(fragment=message.fragment, head=head.version, reason=fault)
    if fault := blob_fault(index, message.update):
        return Error(code="not-found", text=f"COMMIT: {fault}")
    _write_version(index, message, head, unix)
    let_go(index, message.fragment, head.version + 1, versions_kept=versions_kept, damaged=damaged)
    return Committed(fragment=message.fragment, version=head.version + 1)


def _commit_error(message: Commit, num_since: int) -> Error | None:
    learners = [ingredient.id.learner for ingredient in message.recipe.ingredients]
    if not learners or len(set(learners)) != len(learners):
        text = f"COMMIT: a version is made from contributions of distinct learners, not of {learners[:8]}"
        return Error(code="broken-rule", text=text)
    if any(ingredient.id.fragment != message.fragment for ingredient in message.recipe.ingredients):
        text = f"COMMIT: a contribution to another fragment cannot be in a version of fragment {message.fragment}"
        return Error(code="broken-rule", text=text)
    if recipe_bytes(message.recipe) > RECIPE_BYTES_MAX:
        text = f"COMMIT: the recipe of {len(learners)} contributions with their norms would fit no answer"
        return Error(code="too-large", text=text)
    if num_since >= UPDATES_MAX:
        text = f"COMMIT: fragment {message.fragment} is {num_since} versions after its checkpoint: CHECKPOINT one first"
        return Error(code="broken-rule", text=text)
    return None


def recipe_bytes(recipe: Recipe) -> int:
    """Most that a recipe takes when packed, in bytes."""
    return sum(contribution_bytes(len(ingredient.norms)) for ingredient in recipe.ingredients)


def contribution_bytes(num_norms: int) -> int:
    """Most that a contribution without its cursor takes when packed, in bytes: a norm takes 9, the rest under 400."""
    return 400 + 9 * num_norms


def _write_version(index: Index, message: Commit, head: VersionInfo, unix: float) -> None:
    version, ingredients = head.version + 1, message.recipe.ingredients
    tokens = 0
    for ingredient in ingredients:
        row = index.row(ingredient.id.learner, ingredient.id.fragment)
        assert row is not None
        tokens += row.contribution.tokens
        index.put_row(StoredRow(row.contribution, "merged", version))
        index.reset_standing(row.id.learner)
        index.move_references(_row_owner(row.id.learner, row.id.fragment), version_owner(message.fragment, version))
    info = VersionInfo(
        fragment=message.fragment,
        version=version,
        epoch=message.epoch,
        parameters_sha256=message.parameters_sha256,
        optimizer_sha256=message.optimizer_sha256,
        tokens_total=min(COUNT_MAX, head.tokens_total + tokens),
        num_participants=len(ingredients),
        update=message.update,
        recipe=message.recipe,
        recipe_sha256=message.recipe.digest(),
        committed_unix=unix,
    )
    staleness = sum(max(0, head.version - ingredient.base_version) for ingredient in ingredients)
    commitment = Commitment(message.commit_id, tokens, len(ingredients), message.recipe.fraction, staleness)
    index.put_version(info, commitment)
    index.add_reference(message.update.digest, version_owner(message.fragment, version))


def _row_owner(learner: str, fragment: int) -> str:
    return f"row/{learner}/{fragment}"


# --------------------------------------------------------------------------------------------------------------- rows


def rows_of(index: Index, learner: str) -> tuple[Row, ...]:
    """A learner's own rows, one per fragment that it ever contributed to."""
    return tuple(row.shown() for row in index.rows_of(learner))


def own_row(index: Index, learner: str, fragment: int) -> Row | None:
    """The row in a VERSION reply: what became of the asker's last contribution, as of the very same head."""
    row = index.row(learner, fragment)
    return None if row is None else row.shown()
