"""Files and stored entries that somebody spoilt: the value that was written, or one sentence for who can mend it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save

from isles.brokers.store.index import DamagedEntryError
from isles.brokers.store.sqlite_schema import decode, decode_version, encode, encode_version
from isles.ops.chaos.options import read_file as read_plan_file
from isles.proto.agreement import RunRecord, SyncSettings
from isles.proto.config import FreeSettings, Stated, resolve
from isles.proto.errors import MessageError, UsageError
from isles.proto.ids import ContributionId
from isles.proto.key_files import (
    ALLOW_LIST_FILE,
    read_allow_list,
    read_client_key,
    write_allow_list,
    write_client_key,
)
from isles.proto.keys import AllowedKey, AllowList, ClientKey
from isles.proto.logs import ListLogger
from isles.proto.manifest import Manifest
from isles.proto.messages import Contribution, Message, Offer, VersionInfo, VersionReply
from isles.workers.books import FragmentBooks, OpenContribution
from isles.workers.checkpoint import INDEX_NAME, Checkpoint, read_checkpoint, write_checkpoint

if TYPE_CHECKING:
    from tests.fuzz.conftest import Spoiler

Spoilers = Callable[[int], "Spoiler"]
Check = Callable[[Exception], None]

EXAMPLES = 60
"""Of each file in every run of the tests."""
SOAKED = 5000
MODELS = {"sync": SyncSettings}
PUBLIC = "0" * 40
"""A key of zeros, which z85 writes so."""

TOML_BOMBS = [
    b"x = " + b"[" * 50_000,
    b"x = " + b"{a=" * 20_000,
    b"[sync]\ninterval_steps = " + b"9" * 5000,
    b"[sync]\ninterval_steps = 0x" + b"f" * 9000,
    b"[sync]\nhas_cues = 0x" + b"f" * 9000,
    b"[sync]\noverlap_steps = 0x" + b"f" * 9000,
    b"[[fault]]\nat = 1\nkind = 0x" + b"f" * 9000,
    b"[[fault]]\nat = 0x" + b"f" * 9000,
    b"made_unix = 0x" + b"f" * 9000,
    b"[sync]\ngrace_max_seconds = 1e999",
    b"a" + b".a" * 1500 + b" = 1",
    b"[" + b"a." * 1500 + b"a]",
    b"[sync]\ninterval_steps = 1979-13-45",
    b"\xef\xbb\xbf[sync]\n",
    b"\xff\xfe[\0s\0",
    b"\0",
    b"",
    b"#" * (2 << 20),
]
"""Numbers of thousands of digits, thousands of brackets and dots, what is no date, and what is no text."""


def complaint(read: Callable[[], object], check_sentence: Check, kinds: type[Exception] = UsageError) -> str:
    """What is said against it; empty if it was read. Nothing but errors of ours come out."""
    try:
        read()
    except kinds as error:
        check_sentence(error)
        return str(error)
    return ""


# --------------------------------------------------------------------------------------------------------------- TOML


def settings_text() -> bytes:
    return b"""[sync]
preset = "decoupled"
interval_steps = 24
has_cues = true
codec_up = "int4"
overlap_steps = 4.0
blend_alpha = 0.5
"""


def plan_text() -> bytes:
    return b"""seed = 4
[[fault]]
at = 3.5
kind = "freeze"
process = "us-0"
seconds = 4
[[fault]]
at = 9
kind = "cut"
region = "eu"
"""


def key_text(folder: Path) -> bytes:
    write_client_key(
        folder / "a.key", ClientKey(name="a", role="worker", public=PUBLIC, secret=PUBLIC, broker=(PUBLIC,))
    )
    return (folder / "a.key").read_bytes()


def allow_text(folder: Path) -> bytes:
    write_allow_list(folder, AllowList(keys=(AllowedKey(name="a", role="worker", public=PUBLIC),)))
    return (folder / ALLOW_LIST_FILE).read_bytes()


TOML: dict[str, tuple[Callable[[Path], bytes], str, Callable[[Path], object]]] = {
    "settings": (lambda _: settings_text(), "s.toml", lambda path: resolve(MODELS, file=path)),
    "plan": (lambda _: plan_text(), "plan.toml", read_plan_file),
    "key": (key_text, "a.key", read_client_key),
    "allow-list": (allow_text, ALLOW_LIST_FILE, lambda path: read_allow_list(path.parent)),
}
"""What is in a good file, what it is called, and who reads it."""


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def spoil_lines(spoiler: Spoiler, text: bytes) -> bytes:
    """A value of some line becomes another thing, or the bytes are spoilt."""
    if spoiler.chance.random() < 0.5:
        return spoiler.spoil_bytes(text)
    values = [
        b"true", b"-1", b"nan", b"inf", b"1e400", b"[]", b"[1, [2]]", b"{a = {}}", b'""', b'"../../x"', b"9" * 30,
        b'"\\u0000"', b"1979-05-27", b"'''x\n\ny'''", b'"' + b"x" * 3000 + b'"', b"0xfffffffffffffffffff",
    ]  # fmt: skip
    lines = text.splitlines()
    place = spoiler.chance.randrange(len(lines))
    name = lines[place].split(b"=")[0]
    lines[place] = name + b"= " + spoiler.chance.choice(values)
    return b"\n".join(lines) + b"\n"


@pytest.mark.parametrize("kind", TOML)
def test_a_good_file_is_read(kind: str, tmp_path: Path, check_sentence: Check) -> None:
    make, name, read = TOML[kind]
    path = put(tmp_path / name, make(tmp_path))
    assert complaint(lambda: read(path), check_sentence) == ""


@pytest.mark.parametrize("kind", TOML)
def test_a_spoilt_file_is_read_or_refused_in_a_sentence(
    kind: str, tmp_path: Path, spoilers: Spoilers, check_sentence: Check
) -> None:
    make, name, read = TOML[kind]
    text, spoiler = make(tmp_path), spoilers(5)
    refused = 0
    for _ in range(EXAMPLES):
        path = put(tmp_path / name, spoil_lines(spoiler, text))
        said = complaint(lambda path=path: read(path), check_sentence)  # type: ignore[misc]
        assert not said or PUBLIC not in said, "a key is repeated by nobody"
        refused += bool(said)
    assert refused > EXAMPLES // 4


@pytest.mark.parametrize("bomb", range(len(TOML_BOMBS)))
@pytest.mark.parametrize("kind", TOML)
def test_no_text_is_a_bomb(kind: str, bomb: int, tmp_path: Path, check_sentence: Check) -> None:
    path = put(tmp_path / TOML[kind][1], TOML_BOMBS[bomb])
    complaint(lambda: TOML[kind][2](path), check_sentence)


@pytest.mark.parametrize("text", ["9" * 5000, "0x" + "f" * 9000, "[" * 50_000, "{a=" * 9000, "nan", "\0", "\ud800"])
def test_a_flag_or_variable_is_no_bomb(text: str, check_sentence: Check) -> None:
    for models, key in ((MODELS, "sync.interval_steps"), ({"task": FreeSettings}, "task.x")):
        stated = [Stated(key, text, "--x")]
        complaint(lambda models=models, stated=stated: resolve(models, flags=stated), check_sentence)  # type: ignore[misc]


# ------------------------------------------------------------------------------------------- manifests and run records


def test_a_spoilt_manifest_is_refused_in_a_sentence(
    run_record: RunRecord, spoilers: Spoilers, check_sentence: Check
) -> None:
    spoiler, good = spoilers(6), run_record.manifest
    tree = json.loads(good)
    for _ in range(EXAMPLES * 2):
        spoilt = json.dumps(plain(spoiler.spoil_tree(tree)), separators=(",", ":"), sort_keys=True)
        if spoiler.chance.random() < 0.3:
            spoilt = spoiler.spoil_bytes(good.encode()).decode(errors="replace")
        try:
            manifest = Manifest.from_text(spoilt)
        except MessageError as error:
            check_sentence(error)
        else:
            assert manifest.to_text() == spoilt


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, '{"format":1e999}', "\ud800", "null", ""])
def test_no_manifest_is_a_bomb(text: str, check_sentence: Check) -> None:
    assert complaint(lambda: Manifest.from_text(text), check_sentence, MessageError)


def plain(tree: Any) -> Any:
    """What JSON can hold of it."""
    if isinstance(tree, dict):
        return {str(key): plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    return tree if isinstance(tree, str | int | float | None) else repr(tree)


def test_a_spoilt_run_record_is_another_one_or_invalid(run_record: RunRecord, spoilers: Spoilers) -> None:
    spoiler, tree = spoilers(7), json.loads(run_record.model_dump_json())
    for _ in range(EXAMPLES):
        try:
            record = RunRecord.model_validate_json(json.dumps(plain(spoiler.spoil_tree(tree))))
        except ValidationError:
            continue
        assert RunRecord.model_validate_json(record.model_dump_json()) == record
        record.first_difference(
            {"sync.interval_steps": 3, "x": None, "": 1, "sync": 2, "task_settings.task": float("nan")}
        )


# ------------------------------------------------------------------------------------------------- entries of the index


def test_a_spoilt_entry_of_the_index_is_named(
    every_message: tuple[Message, ...], spoilers: Spoilers, check_sentence: Check
) -> None:
    spoiler = spoilers(8)
    [offer] = [message for message in every_message if isinstance(message, Offer)]
    [reply] = [message for message in every_message if isinstance(message, VersionReply)]
    contribution, info = encode(offer.contribution), encode_version(reply.head)
    for _ in range(EXAMPLES):
        row = spoil_packed(spoiler, contribution)
        complaint(lambda row=row: decode(Contribution, row, "a row"), check_sentence, DamagedEntryError)  # type: ignore[misc]
        first, second = spoil_packed(spoiler, info[0]), spoil_packed(spoiler, info[1])
        for parts in ((first, info[1]), (info[0], second)):
            read = lambda parts=parts: decode_version(parts[0], 0, 2, parts[1])  # noqa: E731
            if not complaint(read, check_sentence, DamagedEntryError):
                assert isinstance(read(), VersionInfo)


def spoil_packed(spoiler: Spoiler, data: bytes) -> bytes:
    if spoiler.chance.random() < 0.4:
        return spoiler.spoil_bytes(data)
    tree = spoiler.spoil_tree(msgpack.unpackb(data, use_list=False, strict_map_key=False))
    try:
        packed: bytes = msgpack.packb(tree)
    except (TypeError, ValueError):
        return spoiler.spoil_bytes(data)
    return packed


# --------------------------------------------------------------------------------------------------------- checkpoints

OPEN = ContributionId("us-0", 0, "ab" * 8, 3)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The folder of a good one."""
    books = (FragmentBooks(0, base=4, open=OpenContribution(OPEN, 20, 2, 1.5)), FragmentBooks(1, base=5))
    made = Checkpoint(
        learner="us-0", run="toy", manifest_digest="d" * 64, incarnation="ab" * 8, num_steps=12, tokens=480,
        cursor={3: 17}, books=books, thetas={0: torch.ones(2), 1: torch.zeros(3)},
        anchors={0: torch.ones(2)}, residuals={}, payloads={OPEN: b"payload"},
        lives={"s": torch.ones(1, dtype=torch.bfloat16)}, lags={"s": torch.zeros(1)}, buffers={"n": torch.tensor(7)},
        optimizer_name="AdamW",
        optimizer_state={"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.99)}]},
    )  # fmt: skip
    write_checkpoint(tmp_path, made)
    return tmp_path


def read(folder: Path, check_sentence: Check) -> Checkpoint | None:
    log = ListLogger()
    try:
        found = read_checkpoint(folder, learner="us-0", run="toy", manifest_digest="d" * 64, log=log)
    except UsageError as error:
        check_sentence(error)
        return None
    for _, _, fields in log.records:
        check_sentence(Exception(fields["text"]))
    assert (found is None) == (len(log.records) == 1)
    return found


def put_index(folder: Path, text: bytes) -> None:
    """With the digest that it must have: whoever spoils it knows how."""
    (folder / INDEX_NAME).write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text + b"\n")


def test_a_checkpoint_with_a_spoilt_index_is_read_or_reported(
    checkpoint: Path, spoilers: Spoilers, check_sentence: Check
) -> None:
    spoiler = spoilers(9)
    good = (checkpoint / INDEX_NAME).read_bytes().split(b"\n")[1]
    tree = json.loads(good)
    assert read(checkpoint, check_sentence) is not None
    for number in range(EXAMPLES):
        if number % 4 == 0:
            put_index(checkpoint, spoiler.spoil_bytes(good))
        elif number % 4 == 1:
            state = plain(spoiler.spoil_tree(tree["optimizer_state"]))
            put_index(checkpoint, json.dumps({**tree, "optimizer_state": state}).encode())
        else:
            put_index(checkpoint, json.dumps(plain(spoiler.spoil_tree(tree))).encode())
        read(checkpoint, check_sentence)


@pytest.mark.parametrize(
    "state",
    [
        {}, {"a": 1, "b": 2}, {"dict": 5}, {"dict": [5]}, {"dict": [[1, 2, 3]]}, {"dict": [[[], 1]]}, {"list": None},
        {"tensor": []}, {"tensor": {"x": 1}}, {"tensor": "../x"}, {"other": [1]}, 5, [1],
    ],
)  # fmt: skip
def test_an_optimizer_of_another_form_is_reported(checkpoint: Path, state: Any, check_sentence: Check) -> None:
    tree = json.loads((checkpoint / INDEX_NAME).read_bytes().split(b"\n")[1])
    put_index(checkpoint, json.dumps({**tree, "optimizer_state": state}).encode())
    assert read(checkpoint, check_sentence) is None


def put_tensors(folder: Path, data: bytes) -> None:
    tree = json.loads((folder / INDEX_NAME).read_bytes().split(b"\n")[1])
    (folder / tree["tensors_file"]).write_bytes(data)
    put_index(folder, json.dumps({**tree, "tensors_sha256": hashlib.sha256(data).hexdigest()}).encode())


def test_a_checkpoint_with_spoilt_tensors_is_read_or_reported(
    checkpoint: Path, spoilers: Spoilers, check_sentence: Check
) -> None:
    [path] = checkpoint.glob("*.safetensors")
    good, spoiler = path.read_bytes(), spoilers(10)
    for _ in range(EXAMPLES):
        put_tensors(checkpoint, spoiler.spoil_bytes(good))
        read(checkpoint, check_sentence)


@pytest.mark.parametrize(
    "change",
    [{"theta.x": torch.ones(1)}, {"payload.0": torch.ones(2, dtype=torch.bfloat16)}, {"theta.0": None},
     {".": torch.ones(1)}, {"theta.-1": torch.ones(1)}, {"payload.0": torch.ones(2, 2)}],
)  # fmt: skip
def test_tensors_that_belong_to_nothing_are_reported_or_left_alone(
    checkpoint: Path, change: dict[str, torch.Tensor | None], check_sentence: Check
) -> None:
    from safetensors.torch import load_file

    [path] = checkpoint.glob("*.safetensors")
    tensors = {name: one for name, one in {**load_file(path), **change}.items() if one is not None}
    put_tensors(checkpoint, save(tensors))
    read(checkpoint, check_sentence)


def test_a_checkpoint_names_no_file_outside_its_folder(checkpoint: Path, check_sentence: Check) -> None:
    tree = json.loads((checkpoint / INDEX_NAME).read_bytes().split(b"\n")[1])
    [path] = checkpoint.glob("*.safetensors")
    outside = checkpoint.parent / "outside.safetensors"
    path.rename(outside)
    for name in ("../outside.safetensors", str(outside), "..", "", "\0"):
        put_index(checkpoint, json.dumps({**tree, "tensors_file": name}).encode())
        assert read(checkpoint, check_sentence) is None
    os.replace(outside, path)


# ---------------------------------------------------------------------------------------------------------------- more


@pytest.mark.soak
@pytest.mark.parametrize("kind", TOML)
def test_many_more_spoilt_files(kind: str, tmp_path: Path, spoilers: Spoilers, check_sentence: Check) -> None:
    make, name, read_one = TOML[kind]
    text, spoiler = make(tmp_path), spoilers(11)
    for _ in range(SOAKED):
        path = put(tmp_path / name, spoil_lines(spoiler, text))
        complaint(lambda path=path: read_one(path), check_sentence)  # type: ignore[misc]
