"""A model's tensors and its fragments' flat vectors: what is synchronised, and how values go from one to the other.

Policy. Trainable float32 parameters are synchronised. Frozen ones are taken to be equal everywhere and are never sent.
Buffers, BatchNorm's running means among them, stay each learner's own (role `buffer_skip`); a learner's checkpoint has
them. Parameters that share one storage have one owner, the first of their names, and are changed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import nn

from isles.proto.errors import ManifestError
from isles.proto.manifest import Manifest, TensorSpec

HOST: Final = torch.device("cpu")

_Place = tuple[str, int, int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class ModelTensors:
    """What a manifest is made from, and the tensors behind the names."""

    specs: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]
    """Second name of a tied tensor -> the name that owns it."""
    parameters: Mapping[str, nn.Parameter]
    """Owner's name -> synchronised parameter."""
    buffers: Mapping[str, torch.Tensor]


def describe(model: nn.Module) -> ModelTensors:
    """All tensors of a model, each storage once.

    Raises ManifestError, which names the tensor, for a trainable parameter that is not float32 or has no values yet,
    and for parameters that overlap in memory without being the same.
    """
    specs: dict[str, TensorSpec] = {}
    aliases: dict[str, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    owners: dict[_Place, str] = {}
    for name, parameter in sorted(model.named_parameters(remove_duplicate=False)):
        owner = owners.setdefault(_place(name, parameter), name)
        if owner != name:
            _check_tie(name, parameter, owner, specs[owner])
            aliases[name] = owner
            continue
        _check_trainable(name, parameter)
        specs[name] = _spec(name, parameter, "parameter" if parameter.requires_grad else "frozen")
        if parameter.requires_grad and parameter.numel():
            parameters[name] = parameter
    _check_overlaps(owners)
    buffers = {name: buffer for name, buffer in sorted(model.named_buffers()) if name not in specs}
    for name, buffer in buffers.items():
        specs[name] = _spec(name, buffer, "buffer_skip")
    return ModelTensors(tuple(specs.values()), aliases, parameters, buffers)


class FlatModel:
    """The fragments of a model as flat fp32 vectors on the host, in the manifest's order.

    Reads and writes happen under no_grad and in place: the optimizer keeps its parameters. One thread at a time.
    """

    def __init__(self, tensors: ModelTensors, manifest: Manifest) -> None:
        self.num_values = tuple(fragment.num_values for fragment in manifest.fragments)
        self._slices = tuple(manifest.slices(fragment.fragment_id) for fragment in manifest.fragments)
        self._parameters = tuple(tuple(tensors.parameters[one.name] for one in slices) for slices in self._slices)
        self.device = self._parameters[0][0].device

    def parameters(self, fragment: int) -> tuple[nn.Parameter, ...]:
        """The parameters of a fragment, in manifest order."""
        return self._parameters[fragment]

    def bounds(self, fragment: int) -> list[tuple[int, int]]:
        """Start and stop of each tensor in the fragment's vector, in manifest order."""
        return [(one.start, one.stop) for one in self._slices[fragment]]

    @torch.no_grad()
    def gather(self, fragment: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The live values of a fragment, [num_values] float32 on the host, in `out` if it is given."""
        if out is None:
            out = torch.empty(self.num_values[fragment], dtype=torch.float32)
        flat = [parameter.detach().reshape(-1) for parameter in self._parameters[fragment]]
        if self.device == HOST:
            return torch.cat(flat, out=out)
        return out.copy_(torch.cat([one.to(self.device) for one in flat]))

    @torch.no_grad()
    def scatter(self, fragment: int, values: torch.Tensor) -> None:
        """The live values of a fragment become `values` [num_values] float32."""
        for parameter, part in self._parts(fragment, values):
            parameter.copy_(part)

    @torch.no_grad()
    def add(self, fragment: int, increment: torch.Tensor) -> None:
        """Adds `increment` [num_values] float32 to the live values of a fragment."""
        for parameter, part in self._parts(fragment, increment):
            parameter.add_(part)

    @torch.no_grad()
    def is_finite(self, fragment: int) -> bool:
        """Whether no live value of a fragment is NaN or infinite."""
        return all(bool(torch.isfinite(parameter).all()) for parameter in self._parameters[fragment])

    def _parts(self, fragment: int, values: torch.Tensor) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        moved = values.to(self.device)
        for parameter, one in zip(self._parameters[fragment], self._slices[fragment], strict=True):
            yield parameter, moved[one.start : one.stop].view(one.shape).to(parameter.device)


def _spec(name: str, tensor: torch.Tensor, role: str) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, tuple(tensor.shape), dtype, role)  # type: ignore[arg-type]


def _place(name: str, tensor: torch.Tensor) -> _Place:
    """Equal for two tensors that are the same values in the same order; a tensor without values is only itself."""
    if not tensor.numel():
        return (name, 0, 0, (), ())
    return (str(tensor.device), tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tensor.stride())


def _check_trainable(name: str, parameter: nn.Parameter) -> None:
    if not parameter.requires_grad:
        return
    if parameter.device.type == "meta" or isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ManifestError(f"parameter {name!r} has no values yet: materialise the model before it is synchronised")
    if parameter.dtype != torch.float32:
        raise ManifestError(
            f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}: only float32 parameters can be "
            "synchronised, since small deltas round to zero in a narrower type; keep the parameters in float32 and "
            "compute under torch.autocast, or freeze this one"
        )


def _check_tie(name: str, parameter: nn.Parameter, owner: str, spec: TensorSpec) -> None:
    if parameter.requires_grad != (spec.role == "parameter"):
        raise ManifestError(
            f"parameters {name!r} and {owner!r} share their values, but only one of them is trainable: freeze both, or "
            "give each its own storage"
        )


def _check_overlaps(owners: Mapping[_Place, str]) -> None:
    """Two owners in one stretch of memory would be changed twice."""
    spans = []
    for (device, start, item_bytes, shape, strides), name in owners.items():
        if item_bytes:
            last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            spans.append((device, start, start + item_bytes * last, name))
    spans.sort()
    for (device, _, stop, name), (next_device, start, _, next_name) in pairwise(spans):
        if device == next_device and start <= stop:
            raise ManifestError(
                f"parameters {name!r} and {next_name!r} overlap in memory without being the same tensor: a version "
                "would be applied to both; give each its own storage, or tie them as one nn.Parameter"
            )
