"""What a model is made of, and what is done with each of its tensors: decided here, and nowhere else.

    trainable parameter                  synchronised; by plain mean (role `embedding`) if an nn.Embedding holds it
    frozen parameter                     never sent; its values must be equal everywhere, which a digest proves
    second name of the same values       an alias of the first: sent once, changed once
    persistent buffer, floating          averaged, unless it holds NaN or infinity now (a mask with -inf, say)
    persistent buffer, a scalar integer  a counter: the largest advance counts
    any other buffer                     each learner's own

A buffer that is not persistent is no part of a model's state and of its manifest. What cannot be synchronised is
refused by name, with what to do about it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from isles.proto.errors import ManifestError
from isles.proto.manifest import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    PARAMETER_ROLES,
    VALUES_DIGEST_CHARACTERS,
    Role,
    TensorSpec,
)

HASH_THREADS: Final = 8
"""Hash frozen values at a time: each thread takes 0.5 to 2 GB a second, and a frozen model may have tens of GB."""
_Place = tuple[str, int, int, tuple[int, ...], tuple[int, ...]]
"""Device, address, bytes of a value, shape, strides."""


@dataclass(frozen=True, slots=True)
class BufferSlot:
    """Where a module keeps a buffer: it may put another tensor there at any step."""

    module: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """What is there now."""
        found = getattr(self.module, self.key)
        if not isinstance(found, torch.Tensor):
            raise ManifestError(f"buffer {self.key!r} of a {type(self.module).__name__} is gone: keep it in the run")
        return found

    @torch.no_grad()
    def saved(self) -> torch.Tensor | None:
        """A copy on the host that a file can hold, complex numbers as pairs; None if a file cannot hold it."""
        tensor = self.tensor
        if not _has_memory(tensor):
            return None
        plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        return plain.detach().to("cpu", copy=True).contiguous()

    @torch.no_grad()
    def put(self, values: torch.Tensor) -> None:
        """The buffer gets values that `saved` gave, in place if they fit."""
        old = self.tensor
        if old.is_complex():
            values = torch.view_as_complex(values)
        if (old.shape, old.dtype) == (values.shape, values.dtype):
            old.copy_(values)
        else:
            setattr(self.module, self.key, values.to(old.device))


@dataclass(frozen=True)
class ModelTensors:
    """What a manifest is made from, and the tensors behind the names."""

    specs: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]
    """Second name of a tied tensor -> the name that owns it."""
    parameters: Mapping[str, nn.Parameter]
    """Owner's name -> synchronised parameter."""
    buffers: Mapping[str, BufferSlot]
    """Owner's name -> persistent buffer, merged or not."""


def describe(model: nn.Module) -> ModelTensors:
    """All tensors of a model's state, each storage once.

    Hashes the frozen ones, so it takes about a second for each 1 to 4 GB of them. Raises ManifestError, which names the
    tensor, for what cannot be synchronised or compared.
    """
    owners: dict[_Place, TensorSpec] = {}
    aliases: dict[str, str] = {}
    parameters = _describe_parameters(model, owners, aliases)
    buffers = _describe_buffers(model, owners, aliases)
    _check_overlaps(owners)
    frozen = {spec.name for spec in owners.values() if spec.role == "frozen"}
    digests = _digests({name: one for name, one in model.named_parameters(remove_duplicate=False) if name in frozen})
    specs = [replace(spec, values_digest=digests.get(spec.name, "")) for spec in owners.values()]
    return ModelTensors(tuple(specs), aliases, parameters, buffers)


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuses an optimizer that trains what no version would ever contain. Raises ManifestError."""
    own = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in own:
                raise ManifestError(
                    f"the optimizer trains a parameter of shape {tuple(parameter.shape)} that is not in the model, so "
                    "no other learner would get its work: put it into the model, or make the optimizer after the last "
                    "change of the model (such as .to(...) of a new copy, or a parametrisation)"
                )


# ---------------------------------------------------------------------------------------------------------- parameters


def _describe_parameters(
    model: nn.Module, owners: dict[_Place, TensorSpec], aliases: dict[str, str]
) -> dict[str, nn.Parameter]:
    """Fills `owners` and `aliases`; returns those that are synchronised."""
    found: dict[str, nn.Parameter] = {}
    named = sorted(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        _check_parameter(name, parameter)
    embedded = {
        _place("", parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters()
    }
    for name, parameter in named:
        place = _place(name, parameter)
        if (owner := owners.get(place)) is not None:
            _check_tie(name, parameter, owner)
            aliases[name] = owner.name
            continue
        trained: Role = "embedding" if place in embedded else "parameter"
        owners[place] = spec = _spec(name, parameter, trained if parameter.requires_grad else "frozen")
        if spec.is_synchronised:
            found[name] = parameter
    return found


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, UninitializedParameter) or parameter.device.type == "meta":
        raise ManifestError(f"parameter {name!r} has no values yet: materialise the model before it is synchronised")
    if parameter.layout != torch.strided:
        raise ManifestError(
            f"parameter {name!r} is sparse ({parameter.layout}): keep it dense; sparse gradients, as of "
            "nn.Embedding(sparse=True), are no obstacle"
        )
    if parameter.is_quantized:
        raise ManifestError(
            f"parameter {name!r} is a quantised tensor: dequantise it, or keep its codes and scales as frozen "
            "parameters of plain types"
        )
    if not _has_memory(parameter):
        raise ManifestError(
            f"parameter {name!r} is a {type(parameter.data).__name__} without memory of its own: give the learner a "
            "model whose parameters are plain tensors"
        )
    if not parameter.requires_grad:
        return
    if _type(parameter) not in FLOAT_DTYPES:
        hint = "keep real and imaginary parts as floats (torch.view_as_real)" if parameter.is_complex() else "freeze it"
        raise ManifestError(
            f"parameter {name!r} is {_type(parameter)}, only {', '.join(sorted(FLOAT_DTYPES))} can be merged: {hint}"
        )
    if _covers_itself(parameter):
        raise ManifestError(
            f"parameter {name!r} shows the same memory at several places (an expanded view): make it a parameter of "
            "its true shape and expand it in forward()"
        )


def _check_tie(name: str, parameter: nn.Parameter, owner: TensorSpec) -> None:
    if parameter.requires_grad != (owner.role in PARAMETER_ROLES):
        raise ManifestError(
            f"parameters {name!r} and {owner.name!r} share their values, but only one of them is trainable: freeze "
            "both, or give each its own storage"
        )


# ------------------------------------------------------------------------------------------------------------- buffers


def _describe_buffers(
    model: nn.Module, owners: dict[_Place, TensorSpec], aliases: dict[str, str]
) -> dict[str, BufferSlot]:
    """Fills `owners` and `aliases`; returns the buffers that own their values."""
    found: dict[str, BufferSlot] = {}
    for name, slot in sorted(_slots(model), key=lambda pair: pair[0]):
        tensor = slot.tensor
        if isinstance(tensor, UninitializedBuffer) or tensor.device.type == "meta":
            raise ManifestError(f"buffer {name!r} has no values yet: materialise the model before it is synchronised")
        place = _place(name, tensor)
        if place in owners:
            aliases[name] = owners[place].name
            continue
        owners[place] = _spec(name, tensor, _buffer_role(tensor))
        found[name] = slot
    return found


def _slots(model: nn.Module) -> Iterator[tuple[str, BufferSlot]]:
    """The persistent buffers, under each of their names."""
    kept = model.state_dict(keep_vars=True).keys()
    for path, module in model.named_modules(remove_duplicate=False):
        for key, _ in module.named_buffers(recurse=False):
            name = f"{path}.{key}" if path else key
            if name in kept:
                yield name, BufferSlot(module, key)


def _buffer_role(tensor: torch.Tensor) -> Role:
    if not _has_memory(tensor) or _covers_itself(tensor):
        return "buffer_skip"
    if _type(tensor) in FLOAT_DTYPES:
        return "buffer_average" if bool(torch.isfinite(tensor).all()) else "buffer_skip"
    return "buffer_maximum" if _type(tensor) in INTEGER_DTYPES and tensor.dim() == 0 else "buffer_skip"


# -------------------------------------------------------------------------------------------------------------- memory


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _spec(name: str, tensor: torch.Tensor, role: Role) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), _type(tensor), role)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is dense values at an address; wrappers around other tensors are not."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return False
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        return False


def _place(name: str, tensor: torch.Tensor) -> _Place:
    """Equal for two tensors that are the same values in the same order; without values each is only itself."""
    if not _has_memory(tensor) or not tensor.numel():
        return (name, 0, 0, (), ())
    return (str(tensor.device), tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tensor.stride())


def _covers_itself(tensor: torch.Tensor) -> bool:
    """Whether some values lie on top of each other: more of them than the memory between the first and the last."""
    if not tensor.numel():
        return False
    return tensor.numel() > 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _check_overlaps(owners: Mapping[_Place, TensorSpec]) -> None:
    """Two owners in one stretch of memory would be changed twice, and a frozen one would not stay what it is."""
    spans = []
    for (device, start, item_bytes, shape, strides), spec in owners.items():
        if item_bytes and spec.role != "buffer_skip":
            last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            spans.append((device, start, start + item_bytes * last, spec.name, spec.role != "frozen"))
    furthest: dict[tuple[str, bool], tuple[int, str]] = {}
    for device, start, stop, name, is_changed in sorted(spans):
        for other_changed in (True, False):
            other_stop, other = furthest.get((device, other_changed), (-1, ""))
            if start <= other_stop and (is_changed or other_changed):
                raise ManifestError(
                    f"{other!r} and {name!r} overlap in memory without being the same tensor: a version would be "
                    "applied to both; give each its own storage, or tie them as one nn.Parameter"
                )
        furthest[device, is_changed] = max(furthest.get((device, is_changed), (-1, "")), (stop, name))


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name -> digest of the values as they lie in memory, row by row; hashing gives other threads room to work."""
    with ThreadPoolExecutor(HASH_THREADS, "digest") as threads:
        return dict(zip(tensors, threads.map(_digest, tensors.values()), strict=True))


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()[:VALUES_DIGEST_CHARACTERS]
