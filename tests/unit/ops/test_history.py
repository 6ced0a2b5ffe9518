"""What `isles history` and `isles replay` tell, and that they read a store without trusting it."""

from __future__ import annotations

import io
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from isles.brokers.retained import REJECTED_COUNTER, RUN_RECORD
from isles.brokers.store.index import Commitment, StoredLearner, StoredRow
from isles.brokers.store.store import Store
from isles.ops.changes import read_record
from isles.ops.history import as_json, clip_lines, describe, newest, rejection_lines, render
from isles.ops.reach import Reach
from isles.ops.rejections import find_rejections
from isles.ops.replay import exit_code, sentence
from isles.ops.tape import StoreTape, check_index, index_snapshot, open_tape, store_of
from isles.outer.replay import Difference, Replayed
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.errors import PayloadError, StoreError, UnreachableError, UsageError
from isles.proto.ids import ContributionId
from isles.proto.messages import BlobRef, Contribution, Ingredient, Recipe, VersionInfo

OLD, NEW = SyncSettings(num_fragments=1), SyncSettings(num_fragments=1, interval_steps=9, codec_up="int8")
RECORD = RunRecord(
    run="demo", seed=1, sync=NEW, past_sync=(OLD,), budget=Budget(rounds=9), manifest_digest="0" * 64, manifest="{}"
)
BLOB = BlobRef(digest="ab" * 32, size_bytes=4)


def make_id(learner: str, number: int) -> ContributionId:
    return ContributionId(learner, 0, "cd" * 8, number)


def make_version(number: int, learners: tuple[str, ...], sync: SyncSettings, **fields: Any) -> VersionInfo:
    ingredients = tuple(
        Ingredient(
            id=make_id(learner, number),
            digest=BLOB.digest,
            base_version=max(0, number - 3),
            tokens=500,
            steps=6,
            weight=1,
        )
        for learner in learners
    )
    recipe = Recipe(
        ingredients=ingredients,
        fraction=0.25,
        merge_rule="mean",
        settings_digest=sync.digest,
        waited_seconds=1.5,
        grace_seconds=0.5,
    )
    return VersionInfo(
        fragment=0,
        version=number,
        parameters_sha256="0" * 64,
        num_participants=len(learners),
        tokens_total=500 * number,
        update=BLOB,
        recipe=recipe,
        committed_unix=1e9,
        **fields,
    )


VERSIONS = [
    VersionInfo(fragment=0, version=0, parameters_sha256="0" * 64, parameters=BLOB, committed_unix=1e9),
    make_version(1, ("us-0",), OLD, parameters=BLOB),
    make_version(2, ("eu-0", "us-0"), OLD),
    make_version(3, tuple(f"a-learner-with-a-long-name-{n}" for n in range(40)), NEW),
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A stopped broker's store with four versions, and two rejected contributions of which it has one left."""
    opened = Store.open(tmp_path / "run" / "store")
    index = opened.index
    with index.transaction():
        index.put_value(RUN_RECORD, RECORD.model_dump_json().encode())
        for info in VERSIONS:
            index.put_version(info, Commitment(f"{info.version:016}", 0, info.num_participants, 1.0, 0))
        contribution = Contribution(
            id=make_id("us-1", 7), base_version=0, blob=BLOB, codec="int4", tokens=1, steps=1, seconds=1.0, norms=(1.0,)
        )
        index.put_learner(StoredLearner("us-1", "us", "cd" * 8, False, 0.0))
        index.put_row(StoredRow(contribution, "rejected", None, "tensor w is not finite"))
        index.add_to_counter(REJECTED_COUNTER, 2)
    opened.close()
    return tmp_path / "run" / "store"


def text_of(found: dict[str, Any], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    for part in render(found, "runs/demo/store"):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def found_in(store: Path) -> dict[str, Any]:
    with open_tape(store.parent, None, 1.0) as tape:
        versions = {0: [describe(tape.record, info) for info in newest(tape, 0, None)]}
        return as_json(tape.record, versions, tape.num_rejected, find_rejections(tape, store.parent))


# ------------------------------------------------------------------------------------------------------------- history


def test_a_version_is_described_with_all_that_its_recipe_says(store: Path) -> None:
    (fragment,) = found_in(store)["fragments"]
    told = fragment["versions"][2]
    assert told["participants"] == ["eu-0", "us-0"]
    assert (told["tokens"], told["fraction"], told["staleness"]) == (1000, 0.25, 1.0)
    assert (told["waited_seconds"], told["grace_seconds"]) == (1.5, 0.5)
    assert (told["settings_epoch"], told["is_checkpoint"], told["is_on_tape"]) == (0, False, True)
    assert fragment["versions"][1]["is_checkpoint"]
    assert fragment["versions"][3]["settings_epoch"] == 1


def test_the_outer_learning_rate_is_told_even_where_the_recipe_leaves_out_the_constant_one() -> None:
    faster = NEW.model_copy(update={"outer_learning_rate": 0.25})
    record = RECORD.model_copy(update={"sync": faster})
    constant = make_version(1, ("us-0",), faster)
    assert describe(record, constant)["learning_rate"] == 0.25
    assert describe(record, make_version(1, ("us-0",), OLD))["learning_rate"] == OLD.outer_learning_rate
    assert constant.recipe is not None
    scheduled = constant.model_copy(update={"recipe": constant.recipe.model_copy(update={"learning_rate": 0.125})})
    assert describe(record, scheduled)["learning_rate"] == 0.125
    assert describe(RECORD, constant)["learning_rate"] is None


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_and_keep_every_figure(width: int, store: Path) -> None:
    text = text_of(found_in(store), width)
    assert max(map(len, text.splitlines())) <= width
    for part in (
        "fragment 0", "beginning", "2: eu-0 us-0", "1,000", "0.25", "1.5 s", "0.5 s", "checkpoint", "tape",
        "settings 0", "settings 1", "interval_steps 48 -> 9", "codec_up step1.5 -> int8", "20,000",
    ):  # fmt: skip
        assert part in text, part


@pytest.fixture
def east_of_greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Five hours ahead of UTC, as POSIX writes it."""
    monkeypatch.setenv("TZ", "EAST-5")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def lines_told(*times: float) -> list[str]:
    """What is printed for a fragment with a version at each time."""
    versions = [
        describe(RECORD, make_version(n, ("us-0",), NEW).model_copy(update={"committed_unix": at}))
        for n, at in enumerate(times, 1)
    ]
    text = text_of(as_json(RECORD, {0: versions}, 0, []), 80)
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.usefixtures("east_of_greenwich")
def test_times_of_one_day_are_told_with_that_day_and_the_zone() -> None:
    lines = lines_told(1e9, 1e9 + 60)
    assert "on 2001-09-09, times in EAST" in lines
    assert sum("2001" in line for line in lines) == 1
    assert any("06:46:40" in line for line in lines)


@pytest.mark.usefixtures("east_of_greenwich")
def test_where_times_are_of_several_days_each_day_is_told_once_before_its_versions() -> None:
    midnight = 1e9 + 62_000  # 1e9 is 06:46:40 there
    lines = lines_told(midnight - 1000, midnight - 500, midnight + 500, midnight + 100_000)
    assert "from 2001-09-09 to 2001-09-11, times in EAST" in lines
    starts = ("2001-", "23:", "00:", "03:")
    told = [part for line in lines for part in line.split() if part.startswith(starts) and "from" not in line]
    assert told == ["2001-09-09", "23:43:20", "23:51:40", "2001-09-10", "00:08:20", "2001-09-11", "03:46:40"]


def test_versions_whose_time_is_not_known_have_none() -> None:
    assert not [line for line in lines_told(0.0) if "times in" in line]


def test_whose_contributions_were_scaled_down_is_said() -> None:
    def clip(info: VersionInfo, learner: str) -> VersionInfo:
        assert info.recipe is not None
        ingredients = [
            one.model_copy(update={"clip": 0.25}) if one.id.learner == learner else one
            for one in info.recipe.ingredients
        ]
        return info.model_copy(update={"recipe": info.recipe.model_copy(update={"ingredients": tuple(ingredients)})})

    versions = [make_version(1, ("a", "b"), NEW), *(clip(make_version(n, ("a", "b"), NEW), "b") for n in (2, 3))]
    described = [describe(RECORD, info) for info in versions]
    assert [one["clipped"] for one in described] == [{}, {"b": 0.25}, {"b": 0.25}]
    [_, line] = clip_lines([{"versions": described}])
    assert line.endswith("contributions of: b 2")
    assert list(clip_lines([{"versions": described[:1]}])) == []


def test_the_newest_versions_are_chosen(store: Path) -> None:
    with open_tape(store, None, 1.0) as tape:
        assert [info.version for info in newest(tape, 0, 2)] == [2, 3]
        assert [info.version for info in newest(tape, 0, 99)] == [0, 1, 2, 3]


def test_without_a_log_the_rejections_that_the_store_still_has_are_told(store: Path) -> None:
    found = found_in(store)
    assert found["num_rejected"] == 2
    assert found["rejections"] == [{"learner": "us-1", "fragment": 0, "number": 7, "reason": "tensor w is not finite"}]
    text = text_of(found, 120)
    assert "2 contributions were rejected; the last ones that are known:" in text
    assert "us-1, fragment 0, number 7: tensor w is not finite" in text


def test_the_brokers_log_has_all_of_them(store: Path) -> None:
    log = store.parent / "logs" / "broker.jsonl"
    log.parent.mkdir()
    fields = {"event": "contribution.rejected", "learner": "us-1", "fragment": 0, "reason": "no"}
    lines = [json.dumps(fields | {"number": number}) for number in (3, 7)]
    log.write_text("\n".join([lines[0], "{}", "garbage contribution.rejected", lines[1]]), encoding="utf-8")
    assert [one["number"] for one in found_in(store)["rejections"]] == [3, 7]


@pytest.mark.parametrize(
    ("num", "known", "line"),
    [
        (0, [], "No contribution was rejected."),
        (1, [{"learner": "a", "fragment": 0, "number": 1, "reason": "r"}], "1 contribution was rejected:"),
        (5, [], "5 contributions were rejected; the broker only counts them, its log has the reasons."),
    ],
)
def test_what_is_known_of_rejections_is_said(num: int, known: list[dict[str, Any]], line: str) -> None:
    assert line in list(rejection_lines(num, known))


# ------------------------------------------------------------------------------------------------------------ the tape


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no run folder"):
        store_of(tmp_path)


def test_a_store_without_a_run_is_refused(tmp_path: Path) -> None:
    Store.open(tmp_path / "store").close()
    with pytest.raises(UsageError, match="has no run yet"):
        StoreTape(tmp_path / "store")


def test_a_store_of_another_format_is_refused_by_whoever_opens_it_in_one_sentence(store: Path) -> None:
    with closing(sqlite3.connect(store / "index.sqlite")) as database, database:
        database.execute("UPDATE meta SET value = x'31' WHERE key = 'format'")
    said = set()
    for open_it in (StoreTape, read_record, Store.open):
        with pytest.raises(StoreError, match="has format 1, and this build of isles knows only") as caught:
            open_it(store)
        said.add(str(caught.value))
    assert len(said) == 1
    assert "broker" not in said.pop()


def test_a_folder_and_a_broker_are_one_too_many(store: Path) -> None:
    for run, reach in ((store, Reach("tcp://127.0.0.1:1")), (None, None)):
        with pytest.raises(UsageError, match="either a run folder or a broker"), open_tape(run, reach, 1.0):
            pass


def test_the_broker_of_a_store_that_is_in_use_is_asked(store: Path) -> None:
    (store / "address").write_text("tcp://127.0.0.1:1\n", encoding="utf-8")
    opened = Store.open(store)
    try:
        with pytest.raises(UnreachableError, match=r"at tcp://127\.0\.0\.1:1"), open_tape(store, None, 0.1):
            pass
        (store / "address").unlink()
        with pytest.raises(UsageError, match="another process is using the store"), open_tape(store, None, 0.1):
            pass
    finally:
        opened.close()


def test_a_snapshot_of_a_store_in_use_is_of_one_moment_and_in_nobodys_way(store: Path) -> None:
    broker = Store.open(store)
    try:
        with broker.index.transaction():
            broker.index.put_version(make_version(4, ("us-0",), NEW), Commitment("4" * 16, 0, 1, 1.0, 0))
            with index_snapshot(store.parent) as before:
                assert [head.version for head in before.heads()] == [3], "what is not committed is not there"
        with index_snapshot(store) as snapshot:
            assert snapshot.place == str(store)
            with broker.index.transaction():
                broker.index.put_version(make_version(5, ("us-0",), NEW), Commitment("5" * 16, 0, 1, 1.0, 0))
            assert [info.version for info in snapshot.versions(0, 0, 64)] == [0, 1, 2, 3, 4]
            assert [row.state for row in snapshot.rows()] == ["rejected"]
        assert broker.index.head_version(0) == 5
    finally:
        broker.close()


def test_an_index_that_cannot_be_copied_is_one_sentence(store: Path) -> None:
    (store / "index.sqlite").write_bytes(b"no index at all" * 100)
    sentence = r"the index of .* cannot be copied to .* \(file is not a database\)"
    with pytest.raises(UsageError, match=sentence), index_snapshot(store):
        pytest.fail("there is nothing to read")


def test_damage_anywhere_in_the_index_is_found_also_where_nobody_reads(store: Path) -> None:
    path = store / "index.sqlite"
    whole = path.read_bytes()
    with closing(sqlite3.connect(path)) as database:
        page_bytes = database.execute("PRAGMA page_size").fetchone()[0]
    for start in range(0, len(whole), page_bytes):
        path.write_bytes(whole[:start] + b"\xff" * page_bytes + whole[start + page_bytes :])
        with pytest.raises(StoreError, match=r"the index .* is damaged \(.+\): restore the store folder") as caught:
            check_index(store.parent)
        assert "\n" not in str(caught.value)
    path.write_bytes(whole)
    broker = Store.open(store)
    try:
        with broker.index.transaction():
            broker.index.put_value("one", b"1")
            check_index(store)
    finally:
        broker.close()


@pytest.mark.parametrize("column", ["info", "ingredients"])
def test_a_damaged_entry_is_named_and_those_before_it_can_be_read(column: str, store: Path) -> None:
    with closing(sqlite3.connect(store / "index.sqlite")) as database, database:
        database.execute(f"UPDATE versions SET {column} = x'c1' WHERE version = 2")
    tape = StoreTape(store)
    try:
        assert [info.version for info in tape.versions(0, 0, 64)] == [0, 1]
        with pytest.raises(PayloadError, match=r"entry of version 2 of fragment 0 in the index .* is damaged"):
            tape.versions(0, 2, 64)
    finally:
        tape.close()


def test_a_damaged_record_is_one_sentence(store: Path) -> None:
    with closing(sqlite3.connect(store / "index.sqlite")) as database, database:
        database.execute("UPDATE meta SET value = x'7b' WHERE key = ?", (RUN_RECORD,))
    with pytest.raises(PayloadError, match=r"the run record in the index of .* cannot be read"):
        StoreTape(store)


def test_blobs_that_are_missing_or_too_long_are_refused(store: Path) -> None:
    tape = StoreTape(store)
    try:
        with pytest.raises(PayloadError, match="is not in the store"):
            tape.read(BLOB, bytes_max=10)
        tape._store.index.put_blob(BLOB, 1.0)
        with pytest.raises(PayloadError, match=r"is missing in .*blobs"):
            tape.read(BLOB, bytes_max=10)
        with pytest.raises(PayloadError, match="has 4 bytes, at most 3 are right"):
            tape.read(BLOB, bytes_max=3)
    finally:
        tape.close()


# -------------------------------------------------------------------------------------------------------------- replay


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Replayed(2, 4, 9), "fragment 2: versions 5..9 recomputed, bit-equal"),
        (Replayed(2, 4, 4), "fragment 2: nothing to recompute after version 4"),
        (
            Replayed(2, 4, 6, Difference(7, "differs", "its update is another one")),
            "fragment 2: versions 5..6 are bit-equal, version 7 differs: its update is another one",
        ),
        (
            Replayed(2, 4, 6, Difference(7, "unreadable", "its update is damaged")),
            "fragment 2: versions 5..6 are bit-equal, version 7 cannot be recomputed: its update is damaged",
        ),
        (Replayed(2, 4, 4, Difference(5, "differs", "why")), "fragment 2: version 5 differs: why"),
        (Replayed(2, 0, 0, Difference(0, "differs", "why")), "fragment 2: version 0 differs: why"),
        (Replayed(2, 0, 0, Difference(0, "unreadable", "why")), "fragment 2: cannot be replayed: why"),
        (Replayed(2, 4, 4, Difference(5, "outrun", "why")), "fragment 2: version 5 was not reached: why"),
    ],
)
def test_what_came_of_a_fragment_is_one_sentence(result: Replayed, text: str) -> None:
    assert sentence(result) == text


def test_the_exit_code_tells_a_difference_from_damage_and_both_from_a_tape_that_was_too_fast() -> None:
    good = Replayed(0, 0, 9)
    differs, unreadable, outrun = (
        Replayed(1, 0, 3, Difference(4, kind, "why")) for kind in ("differs", "unreadable", "outrun")
    )
    assert exit_code([]) == exit_code([good]) == 0
    assert [exit_code([good, one]) for one in (differs, unreadable, outrun)] == [1, 6, 8]
    assert exit_code([outrun, unreadable, differs]) == 1
    assert exit_code([outrun, good, unreadable]) == 6
