"""What a learner writes to restart itself: one consistent cut at a step boundary, in a folder of its own.

    checkpoint.json              line 1: SHA-256 of line 2; line 2: books, counters, cursor, the optimizer's scalars
    checkpoint-<...>.safetensors parameters, anchors, residuals, lags, open payloads, buffers, the optimizer's tensors

The JSON file names the other one and its digest, and is replaced last, atomically: a crash at any moment leaves the
older checkpoint or the newer one. What does not check out is reported and treated as absent; the store's books win
anyway. Nothing in it can run code.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from isles.proto.clock import Clock
from isles.proto.errors import ConfigError
from isles.proto.ids import ContributionId
from isles.proto.logs import Logger
from isles.workers.books import FragmentBooks

FORMAT: Final = 1
INDEX_NAME: Final = "checkpoint.json"
LEFTOVERS: Final = ("checkpoint-*.safetensors", "checkpoint*.tmp", ".tmp*")
"""Older tensors, and what a crash during a write leaves behind; the last are safetensors' own."""
HASH_BYTES: Final = 1 << 20
"""Read at a time while hashing."""
WRITE_SECONDS_MAX: Final = 300.0
"""Longest wait for a write under way at the end of the process: 100 GB on a fast disk."""


@dataclass
class Checkpoint:
    """One cut. All tensors are copies on the host, or are never changed."""

    learner: str
    run: str
    manifest_digest: str
    incarnation: str
    num_steps: int
    tokens: int
    cursor: dict[int, int]
    books: tuple[FragmentBooks, ...]
    thetas: dict[int, torch.Tensor]
    """Fragment -> live parameters, [num_values] float32; so are anchors and residuals."""
    anchors: dict[int, torch.Tensor]
    residuals: dict[int, torch.Tensor]
    payloads: dict[ContributionId, bytes]
    """Of the open contributions."""
    lives: dict[str, torch.Tensor]
    """Tensor -> live values, of those fragments' tensors that are not float32; with lags they are exact to the bit."""
    lags: dict[str, torch.Tensor]
    """Tensor -> what its live values lack of the exact ones, float32 in its own shape."""
    buffers: dict[str, torch.Tensor]
    """Those of the model's state that a file can hold."""
    optimizer_name: str
    optimizer_state: dict[str, Any]
    """The optimizer's state_dict."""
    store: str = ""
    """Name of the store that the run is in, as WELCOME told it; empty = not known."""


class _Index(BaseModel):
    """The second line of checkpoint.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1]
    learner: str
    run: str
    manifest_digest: str
    incarnation: str
    num_steps: int
    tokens: int
    cursor: dict[int, int]
    books: tuple[FragmentBooks, ...]
    optimizer_name: str
    optimizer_state: Any
    tensors_file: str
    tensors_sha256: str
    store: str = ""


class _DamagedError(Exception):
    """This checkpoint cannot be used; the message says why."""


# ------------------------------------------------------------------------------------------------------------- writing


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Replaces the folder's checkpoint; returns the path of its index.

    Raises OSError if the disk does not take it, ConfigError if the one that is there is another learner's, run's or
    model's: it stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_if_taken(folder / INDEX_NAME, checkpoint)
    tensors: dict[str, torch.Tensor] = {}
    for kind in ("theta", "anchor", "residual"):
        vectors: dict[int, torch.Tensor] = getattr(checkpoint, f"{kind}s")
        tensors |= {f"{kind}.{fragment}": vector for fragment, vector in vectors.items()}
    for named, payload in checkpoint.payloads.items():
        tensors[f"payload.{named.fragment}"] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    for kind, named_tensors in {"live": checkpoint.lives, "lag": checkpoint.lags, "buffer": checkpoint.buffers}.items():
        tensors |= {f"{kind}.{name}": tensor for name, tensor in named_tensors.items()}
    optimizer_state = _flatten(checkpoint.optimizer_state, "optimizer", tensors)

    tensors_path = folder / f"checkpoint-{checkpoint.num_steps}-{secrets.token_hex(4)}.safetensors"
    temporary = tensors_path.with_suffix(".tmp")
    save_file(tensors, temporary)
    _sync(temporary)
    temporary.replace(tensors_path)
    index = _Index(
        format=FORMAT,
        **{name: getattr(checkpoint, name) for name in _COPIED},
        optimizer_state=optimizer_state,
        tensors_file=tensors_path.name,
        tensors_sha256=_digest(tensors_path),
    )
    path = folder / INDEX_NAME
    _replace(path, index)
    for pattern in LEFTOVERS:
        for old in folder.glob(pattern):
            if old != tensors_path:
                old.unlink(missing_ok=True)
    return path


def _refuse_if_taken(path: Path, checkpoint: Checkpoint) -> None:
    try:
        index = _read_index(path)
    except _DamagedError:
        return  # nobody can use it any more
    if index is not None:
        digest = checkpoint.manifest_digest
        _check_owner(path, index, learner=checkpoint.learner, run=checkpoint.run, manifest_digest=digest)


_COPIED: Final = (
    "learner", "run", "manifest_digest", "incarnation", "num_steps", "tokens", "cursor", "books", "optimizer_name",
    "store",
)  # fmt: skip
"""What the index holds as the checkpoint has it."""


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, one at a time, and says what became of them."""

    def __init__(self, folder: Path, *, learner: str, clock: Clock, log: Logger) -> None:
        self._folder = folder
        self._learner = learner
        self._clock = clock
        self._log = log
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, checkpoint: Checkpoint) -> None:
        """Begins a write; only when none is under way."""
        assert not self.is_busy
        self._thread = threading.Thread(target=self._write, args=(checkpoint,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the write under way."""
        if self._thread is not None:
            self._thread.join(WRITE_SECONDS_MAX)

    def _write(self, checkpoint: Checkpoint) -> None:
        started = self._clock.now()
        try:
            path = write_checkpoint(self._folder, checkpoint)
        except (ConfigError, OSError, SafetensorError) as error:
            self._log.warning("checkpoint.failed", learner=self._learner, path=str(self._folder), text=str(error))
            return
        seconds = round(self._clock.now() - started, 3)
        self._log.debug("checkpoint.written", learner=self._learner, path=str(path), seconds=seconds)


# ------------------------------------------------------------------------------------------------------------- reading


def read_checkpoint(folder: Path, *, learner: str, run: str, manifest_digest: str, log: Logger) -> Checkpoint | None:
    """The folder's checkpoint; None if there is none that can be used, which is logged with the reason.

    Raises ConfigError if it is whole but of another learner, run or model: its owner may still want it.
    """
    path = folder / INDEX_NAME
    try:
        index = _read_index(path)
        if index is None:
            return None
        _check_owner(path, index, learner=learner, run=run, manifest_digest=manifest_digest)
        try:
            return _assemble(index, _read_tensors(folder, index))
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise _DamagedError(f"its content has another form ({type(error).__name__})") from error
    except _DamagedError as error:
        log.warning("checkpoint.damaged", learner=learner, path=str(path), text=f"{error}: going on without it")
        return None


def origin_of(folder: Path) -> tuple[str, str]:
    """The run that the folder's checkpoint is of, and its store; both empty if there is none that can be read."""
    try:
        index = _read_index(folder / INDEX_NAME)
    except _DamagedError:
        return "", ""
    return ("", "") if index is None else (index.run, index.store)


def _read_index(path: Path) -> _Index | None:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _DamagedError(f"it cannot be read ({error.strerror})") from error
    if len(lines) != 3 or hashlib.sha256(lines[1]).hexdigest().encode() != lines[0]:
        raise _DamagedError("its index does not have the digest it was written with")
    try:
        return _Index.model_validate_json(lines[1])
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        raise _DamagedError(
            f"its index has another form ({'.'.join(map(str, fault['loc']))}: {fault['msg']})"
        ) from error


def _check_owner(path: Path, index: _Index, *, learner: str, run: str, manifest_digest: str) -> None:
    found = {"learner": index.learner, "run": index.run, "model": index.manifest_digest[:12]}
    for what, wanted in {"learner": learner, "run": run, "model": manifest_digest[:12]}.items():
        if found[what] != wanted:
            raise ConfigError(
                f"the checkpoint {path} is of {what} {found[what]}, this worker has {what} {wanted}: give it another "
                "checkpoint folder, or empty this one if nobody needs it"
            )


def _read_tensors(folder: Path, index: _Index) -> dict[str, torch.Tensor]:
    path = folder / Path(index.tensors_file).name
    try:
        if _digest(path) != index.tensors_sha256:
            raise _DamagedError(f"{path.name} does not have the digest it was written with")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _DamagedError(f"{path.name} cannot be read ({error})") from error


def _assemble(index: _Index, tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    by_kind: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        by_kind.setdefault(kind, {})[rest] = tensor
    opened = {str(books.fragment): books.open.id for books in index.books if books.open and books.open.has_payload}
    try:
        payloads = {named: by_kind["payload"][fragment].numpy().tobytes() for fragment, named in opened.items()}
        optimizer_state = _unflatten(index.optimizer_state, tensors)
    except KeyError as error:
        raise _DamagedError(f"{index.tensors_file} lacks {error}") from error
    if not isinstance(optimizer_state, dict):
        raise _DamagedError("the state of its optimizer is no table")
    vectors = {
        kind: {int(fragment): vector for fragment, vector in by_kind.get(kind, {}).items()}
        for kind in ("theta", "anchor", "residual")
    }
    return Checkpoint(
        **{name: getattr(index, name) for name in _COPIED},
        thetas=vectors["theta"],
        anchors=vectors["anchor"],
        residuals=vectors["residual"],
        payloads=payloads,
        lives=by_kind.get("live", {}),
        lags=by_kind.get("lag", {}),
        buffers=by_kind.get("buffer", {}),
        optimizer_state=optimizer_state,
    )


# ------------------------------------------------------------------------------------------------- the optimizer's tree


def _flatten(tree: object, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Plain data for JSON; tensors move into `tensors` under their path. Raises ConfigError for anything else."""
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case torch.Tensor():
            tensors[path] = tree
            return {"tensor": path}
        case dict():
            for key in tree:
                if not isinstance(key, int | str):
                    raise ConfigError(f"{path}: an optimizer whose state has keys like {key!r} cannot be checkpointed")
            return {"dict": [[key, _flatten(value, f"{path}.{key}", tensors)] for key, value in tree.items()]}
        case list() | tuple():
            kind = "list" if isinstance(tree, list) else "tuple"
            return {kind: [_flatten(value, f"{path}.{index}", tensors) for index, value in enumerate(tree)]}
    raise ConfigError(
        f"{path}: an optimizer whose state holds a {type(tree).__name__} cannot be checkpointed; use one whose state "
        "is tensors and numbers, or start this worker without a checkpoint folder"
    )


def _unflatten(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _unflatten(one, tensors) for key, one in value}
    values = [_unflatten(one, tensors) for one in value]
    return {"list": list, "tuple": tuple}[kind](values)


# ---------------------------------------------------------------------------------------------------------------- files


def _replace(path: Path, index: _Index) -> None:
    text = json.dumps(index.model_dump(mode="json")).encode()
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text + b"\n")
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()
