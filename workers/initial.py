"""Starting a run from given weights: a safetensors file becomes version 0. Nothing in such a file can run code.

Every tensor that the run synchronises must be in the file, in the model's own shape and type, and the file must have
nothing that the model has not: weights of another model are refused by name before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from isles.proto.agreement import SyncSettings
from isles.proto.config import Config, RunSettings
from isles.proto.connection import Connection
from isles.proto.errors import ManifestMismatchError, RefusedError, UsageError
from isles.proto.manifest import Manifest
from isles.proto.messages import Message
from isles.workers.description import ModelTensors, describe
from isles.workers.joining import NewRun, offer_first_version
from isles.workers.record import make_task, shared_task_settings

WELCOME_SECONDS: Final = 30.0
"""Longest wait for the answer to HELLO: however long a broker may take for a model, it is not slow here."""

TYPES: Final[Mapping[str, torch.dtype]] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""Types that a file may have, by the format's own names."""


def start_run(
    config: Config, weights: Path, connection: Connection, *, address: str, timeout_seconds: float
) -> Manifest:
    """Starts a run at a broker that has none; its version 0 are the weights of a file.

    `config` has the sections run, sync and task. Returns the model's manifest. Raises UsageError or ConfigError for
    what a person can mend, ManifestMismatchError for weights of another model, RefusedError if the broker has a run,
    UnreachableError if it does not answer in time.
    """
    welcome_seconds = min(WELCOME_SECONDS, timeout_seconds)
    if connection.wait_for_welcome(welcome_seconds, address=address).welcome.run_record is not None:
        raise RefusedError(f"the broker at {address} has a run already: a run is started once, give it an empty store")
    run = config.section("run", RunSettings)
    task = make_task(None, run.task, config.sections["task"].model_dump())
    model = task.build_model(run.seed)
    load_weights(model, weights)
    new_run = NewRun(
        run.id,
        config.section("sync", SyncSettings),
        run.budget,
        run.seed,
        run.task,
        shared_task_settings(task),
        task.corpus_sha256,
    )
    tensors = describe(model)

    def ask(message: Message, payload: bytes | None = None) -> Message:
        return connection.ask_and_wait(message, timeout_seconds, address=address, payload=payload)

    fault = offer_first_version(tensors, new_run, ask)
    if fault:
        raise RefusedError(f"the broker at {address} took no INIT: {fault}")
    manifest = Manifest.build(tensors.specs, tensors.aliases, new_run.sync.num_fragments)
    connection.start()
    if connection.wait_for_welcome(timeout_seconds, address=address).welcome.run_record != new_run.record(manifest):
        raise RefusedError(f"somebody else has just started another run at {address}: nothing of this one is there")
    return manifest


@torch.no_grad()
def load_weights(model: nn.Module, path: Path) -> None:
    """Copies the tensors of a safetensors file into a model, one at a time, by name.

    A tied tensor may stand under any of its names. Frozen parameters may be left out; those that are given must be what
    the model has, since every worker builds them itself. Raises UsageError for a file that cannot be read or whose
    values are not finite, and ManifestMismatchError, which names the first tensor, for one of another model; the model
    may then be half loaded.
    """
    tensors = describe(model)
    own: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    with _open(path) as file:
        given = set(file.keys())
        for name in sorted(given - own.keys()):
            raise _mismatch(path, name, "is not in the model")
        for name in sorted(given):
            _check_form(path, name, file.get_slice(name), own[name])
        for name in _missing(tensors, given):
            raise _mismatch(path, name, "is missing in the file")
        seen: set[str] = set()
        for name in sorted(given):
            owner = tensors.aliases.get(name, name)
            _load(path, name, file.get_tensor(name), own[name], _role(tensors, owner), is_second=owner in seen)
            seen.add(owner)


def _missing(tensors: ModelTensors, given: set[str]) -> Iterator[str]:
    """Names of synchronised tensors and merged buffers that stand under none of their names."""
    owners = {tensors.aliases.get(name, name) for name in given}
    for spec in sorted(tensors.specs, key=lambda spec: spec.name):
        if (spec.is_synchronised or spec.is_merged_buffer) and spec.name not in owners:
            yield spec.name


def _role(tensors: ModelTensors, owner: str) -> str:
    return next((spec.role for spec in tensors.specs if spec.name == owner), "buffer_skip")


def _check_form(path: Path, name: str, given: Any, own: torch.Tensor) -> None:
    shape, dtype = tuple(given.get_shape()), TYPES.get(given.get_dtype())
    if shape != tuple(own.shape):
        raise _mismatch(path, name, f"has the shape {shape}, the model has {tuple(own.shape)}")
    if dtype != own.dtype:
        wanted = str(own.dtype).removeprefix("torch.")
        raise _mismatch(path, name, f"has the type {given.get_dtype()}, the model has {wanted}: convert the file first")


def _load(path: Path, name: str, given: torch.Tensor, own: torch.Tensor, role: str, *, is_second: bool) -> None:
    if role != "buffer_skip" and given.is_floating_point() and not bool(torch.isfinite(given).all()):
        raise UsageError(f"{path} has no weights to start from: tensor {name!r} holds NaN or infinity")
    if role == "frozen" and not torch.equal(given, own.cpu()):
        raise _mismatch(
            path, name, "is frozen in the model and has other values there; every worker builds frozen values itself"
        )
    if is_second and not torch.equal(given, own.cpu()):
        raise _mismatch(path, name, "is tied to another tensor in the model and has other values than that one")
    if role != "frozen":
        own.copy_(given)


def _mismatch(path: Path, name: str, what: str) -> ManifestMismatchError:
    return ManifestMismatchError(f"{path} has weights of another model: tensor {name!r} {what}")


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UsageError(
            f"{path} is no safetensors file ({error}): convert the weights to that format first"
        ) from error
