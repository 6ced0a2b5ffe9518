"""A model's fragments as flat float32 vectors, and how values go from one to the other.

A tensor narrower than float32, or a counter, cannot hold what a version says of it. So it has a `lag`, in float32:

    exact = float32(live) + lag

Vectors are gathered from exact values, and versions change exact values; the model computes with the live tensor, which
is its exact value rounded to its type. Thus no update is ever lost to rounding. What the inner optimizer loses when it
adds a small step to a narrow tensor is its own affair, as in any training in that type. A float64 tensor holds more
than a vector does and needs no lag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import nn

from isles.proto.errors import ManifestError
from isles.proto.manifest import Manifest, TensorSlice
from isles.workers.description import BufferSlot, ModelTensors

HOST: Final = torch.device("cpu")
EXACT_DTYPES: Final = frozenset({torch.float32, torch.float64})
"""Types that lose nothing of a float32 value."""
COUNTER_MAX: Final = 1 << 53
"""Largest count that is written into a buffer; no training takes as many steps, and it survives every conversion."""


PIECE_VALUES: Final = 1 << 21
"""Values from which on a piece of a fragment is long enough: 8 MiB, on an accelerator one copy and some kernels."""


def fit(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 `values` in another type: to the nearest value there is, which at the ends is the largest one."""
    if dtype in EXACT_DTYPES or dtype.is_complex:
        return values.to(dtype)
    if dtype.is_floating_point:
        limit = torch.finfo(dtype).max
        return values.clamp(-limit, limit).to(dtype)
    limits = torch.iinfo(dtype)
    counts = values.double().round_().clamp_(max(limits.min, -COUNTER_MAX), min(limits.max, COUNTER_MAX))
    return counts.to(dtype)


@dataclass(slots=True)
class _Cell:
    """A tensor of the model, with its place in the vector of its fragment."""

    place: TensorSlice
    source: nn.Parameter | BufferSlot
    dtype: torch.dtype
    lag: torch.Tensor | None = None
    """Float32, on the tensor's device; None = zeros."""

    @property
    def live(self) -> torch.Tensor:
        """The tensor that the model computes with. Raises ManifestError if it is no longer what was described."""
        if isinstance(self.source, nn.Parameter):
            return self.source
        tensor = self.source.tensor
        if (tensor.dtype, tensor.shape) != (self.dtype, self.place.shape):
            raise ManifestError(
                f"buffer {self.place.name!r} was {self.dtype} of shape {self.place.shape} and has become "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}: a buffer that changes its form cannot be merged; "
                "register it with persistent=False"
            )
        return tensor

    def read(self, out: torch.Tensor) -> None:
        """Puts the exact values into `out`, float32 of any shape and on any device."""
        out = out.view(self.place.shape)
        out.copy_(self.live)
        if self.lag is not None:
            out.add_(self.lag.to(out.device))

    def write(self, values: torch.Tensor) -> None:
        """The exact values become `values`, float32 on any device."""
        live = self.live
        values = values.to(live.device)
        live.copy_(fit(values, live.dtype))
        if self.dtype not in EXACT_DTYPES:
            self.lag = torch.sub(values, live, out=self.lag)

    def add(self, increment: torch.Tensor) -> None:
        """Adds `increment`, float32 on any device, to the exact values."""
        live = self.live
        increment = increment.to(live.device)
        if self.dtype in EXACT_DTYPES:
            live.add_(increment)
        else:
            values = torch.empty(live.shape, dtype=torch.float32, device=live.device)
            self.read(values)
            self.write(values.add_(increment))


class Piece(NamedTuple):
    """Some neighbouring tensors of a fragment."""

    fragment: int
    cells: slice
    """Which of the fragment's."""
    values: slice
    """Their place in its vector."""


class Parted(NamedTuple):
    """A fragment's vector, and its views by tensor."""

    values: torch.Tensor
    """[num_values] float32 on the host."""
    parts: tuple[torch.Tensor, ...]
    """In manifest order, each in the shape of its tensor."""


class FlatModel:
    """The fragments of a model as flat float32 vectors on the host, in the manifest's order.

    Reads and writes happen under no_grad and in place: the optimizer keeps its parameters. One thread at a time.
    """

    def __init__(self, tensors: ModelTensors, manifest: Manifest) -> None:
        self.num_values = tuple(fragment.num_values for fragment in manifest.fragments)
        self.fragments = manifest.fragments
        sources: dict[str, nn.Parameter | BufferSlot] = {**tensors.parameters, **tensors.buffers}
        types = {spec.name: getattr(torch, spec.dtype) for spec in manifest.tensors}
        self._cells = tuple(
            tuple(_Cell(one, sources[one.name], types[one.name]) for one in manifest.slices(fragment.fragment_id))
            for fragment in manifest.fragments
        )
        self.device = self._cells[0][0].live.device

    def parameters(self, fragment: int) -> tuple[nn.Parameter, ...]:
        """The parameters of a fragment, in manifest order; none if it is the one of buffers."""
        return tuple(cell.source for cell in self._cells[fragment] if isinstance(cell.source, nn.Parameter))

    def bounds(self, fragment: int) -> list[tuple[int, int]]:
        """Start and stop of each tensor in the fragment's vector, in manifest order."""
        return [(cell.place.start, cell.place.stop) for cell in self._cells[fragment]]

    def pieces(self, fragment: int) -> list[Piece]:
        """The whole fragment in order, in pieces of little more than PIECE_VALUES unless a tensor is larger."""
        found, begin = [], 0
        cells = self._cells[fragment]
        for number, cell in enumerate(cells):
            start = cells[begin].place.start
            if cell.place.stop - start >= PIECE_VALUES or number == len(cells) - 1:
                found.append(Piece(fragment, slice(begin, number + 1), slice(start, cell.place.stop)))
                begin = number + 1
        return found

    def gather(self, fragment: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The exact values of a fragment, [num_values] float32 on the host, in `out` if it is given."""
        return self.gather_piece(self._whole(fragment), out)

    @torch.no_grad()
    def gather_piece(self, piece: Piece, out: torch.Tensor | None = None) -> torch.Tensor:
        """The exact values of a piece, float32 on the host, in `out` if it is given."""
        start = piece.values.start
        if out is None:
            out = torch.empty(piece.values.stop - start, dtype=torch.float32)
        cells = self._cells[piece.fragment][piece.cells]
        if all(cell.dtype == torch.float32 for cell in cells):
            flat = [cell.live.detach().reshape(-1) for cell in cells]
            if self.device == HOST:
                return torch.cat(flat, out=out)
            return out.copy_(torch.cat([one.to(self.device) for one in flat]))
        whole = out if self.device == HOST else torch.empty(out.shape, dtype=torch.float32, device=self.device)
        for cell in cells:
            cell.read(whole[cell.place.start - start : cell.place.stop - start])
        return out if whole is out else out.copy_(whole)

    def parted(self, fragment: int, vector: torch.Tensor) -> Parted:
        """The beginning of `vector`, float32 on the host, as a vector of this fragment. For any thread."""
        values, cells = vector[: self.num_values[fragment]], self._cells[fragment]
        split = torch.split(values, [cell.place.stop - cell.place.start for cell in cells])
        return Parted(values, tuple(part.view(cell.place.shape) for part, cell in zip(split, cells, strict=True)))

    @torch.no_grad()
    def gather_parted(self, fragment: int, out: Parted) -> None:
        """As `gather`, in `out`, by one call of torch where that can be: each lets another thread come in between."""
        if (lives := self._exact_on_host(fragment)) is not None:
            torch._foreach_copy_(out.parts, lives)
        else:
            self.gather(fragment, out.values)

    def scatter(self, fragment: int, values: torch.Tensor) -> None:
        """The exact values of a fragment become `values` [num_values] float32."""
        self.scatter_piece(self._whole(fragment), values)

    @torch.no_grad()
    def scatter_piece(self, piece: Piece, values: torch.Tensor) -> None:
        """The exact values of a piece become `values`, float32."""
        for cell, part in self._parts(piece, values):
            cell.write(part)

    def add(self, fragment: int, increment: torch.Tensor) -> None:
        """Adds `increment` [num_values] float32 to the exact values of a fragment."""
        self.add_piece(self._whole(fragment), increment)

    @torch.no_grad()
    def add_piece(self, piece: Piece, increment: torch.Tensor) -> None:
        """Adds `increment`, float32, to the exact values of a piece."""
        for cell, part in self._parts(piece, increment):
            cell.add(part)

    @torch.no_grad()
    def add_parted(self, fragment: int, increment: Parted) -> None:
        """As `add`, in one pass that needs no memory, where that can be, and by one call of torch."""
        if (lives := self._exact_on_host(fragment)) is not None:
            torch._foreach_add_(lives, increment.parts)
            return
        for piece in self.pieces(fragment):
            self.add_piece(piece, increment.values[piece.values])

    @torch.no_grad()
    def is_finite(self, fragment: int) -> bool:
        """Whether no value of a fragment is NaN or infinite."""
        return all(
            bool(torch.isfinite(one).all())
            for cell in self._cells[fragment]
            for one in (cell.live, cell.lag)
            if one is not None
        )

    @torch.no_grad()
    def rounded(self, fragment: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """What a gathered vector does not tell of a fragment: live tensors that are not float32, and lags.

        Both by name, as copies on the host, in their own shapes; together with the vector they restore the fragment to
        the last bit.
        """
        cells = [cell for cell in self._cells[fragment] if cell.dtype != torch.float32]
        lives = {cell.place.name: _copied(cell.live) for cell in cells}
        return lives, {cell.place.name: _copied(cell.lag) for cell in cells if cell.lag is not None}

    @torch.no_grad()
    def restore(
        self,
        fragment: int,
        values: torch.Tensor,
        lives: Mapping[str, torch.Tensor],
        lags: Mapping[str, torch.Tensor],
    ) -> None:
        """Makes a fragment again from what `gather` and `rounded` said of it; names of other fragments do no harm."""
        self.scatter(fragment, values)
        for cell in self._cells[fragment]:
            if cell.dtype != torch.float32 and cell.place.name in lives:
                live, lag = cell.live, lags.get(cell.place.name)
                live.copy_(lives[cell.place.name])
                cell.lag = None if lag is None else lag.to(live.device, copy=True)

    def _exact_on_host(self, fragment: int) -> list[torch.Tensor] | None:
        """The live tensors of a fragment; None unless all are on the host and are their own exact values."""
        cells = self._cells[fragment]
        lives = [cell.live for cell in cells]
        is_so = all(live.is_cpu and cell.dtype in EXACT_DTYPES for live, cell in zip(lives, cells, strict=True))
        return lives if is_so else None

    def _whole(self, fragment: int) -> Piece:
        return Piece(fragment, slice(0, len(self._cells[fragment])), slice(0, self.num_values[fragment]))

    def _parts(self, piece: Piece, values: torch.Tensor) -> Iterable[tuple[_Cell, torch.Tensor]]:
        moved, start = values.to(self.device), piece.values.start
        for cell in self._cells[piece.fragment][piece.cells]:
            yield cell, moved[cell.place.start - start : cell.place.stop - start].view(cell.place.shape)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(HOST, copy=True).contiguous()
