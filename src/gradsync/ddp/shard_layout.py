"""Which rank owns which elements of which parameter: arithmetic, and views of memory as flat tensors.

A *slice* is one rank's part of a flat buffer; a *piece* is the part of one parameter that lies in a slice.
Elements are counted in *flat* terms throughout: in the order in which they lie in memory, complex numbers as
two real ones. Knows nothing of processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gradsync.ddp.plan import BucketPlan, ParameterSpec, slice_alignment


@dataclass(frozen=True)
class Placement:
    """Where a parameter lies in a flat buffer that is cut into slices of ``slice_numel`` elements, one a rank."""

    offset: int
    numel: int
    slice_numel: int

    def owned_by(self, rank: int) -> range:
        """Return which of the parameter's elements are in the rank's slice; none of them gives an empty range."""
        start = min(max(rank * self.slice_numel - self.offset, 0), self.numel)
        stop = min(max((rank + 1) * self.slice_numel - self.offset, 0), self.numel)
        return range(start, stop)

    def in_slice(self, rank: int) -> slice:
        """Return where in the rank's slice the elements that it owns are."""
        owned = self.owned_by(rank)
        first = self.offset + owned.start - rank * self.slice_numel
        return slice(first, first + len(owned))


def placements_in(
    plan: BucketPlan, specs: tuple[ParameterSpec, ...], num_slices: int
) -> Iterator[tuple[str, Placement]]:
    """Yield the names and placements of a bucket's parameters; ``specs`` are those of the whole model."""
    for index, offset in zip(plan.indices, plan.offsets, strict=True):
        yield specs[index].name, Placement(offset, specs[index].flat_numel, plan.numel // num_slices)


def lone_placement(spec: ParameterSpec, num_slices: int) -> Placement:
    """Return the placement of a parameter that is in no bucket, as if it had a buffer of its own."""
    alignment = slice_alignment(spec.flat_dtype)
    return Placement(0, spec.flat_numel, -(-spec.flat_numel // (num_slices * alignment)) * alignment)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as one-dimensional real tensor that shares it."""
    per_element = 2 if tensor.is_complex() else 1
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    start, numel = tensor.storage_offset() * per_element, tensor.numel() * per_element
    return view.set_(tensor.untyped_storage(), start, (numel,), (1,))  # type: ignore[call-overload, no-any-return]


def is_laid_out_as(spec: ParameterSpec, tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory holds its elements in the parameter's order."""
    return tuple(tensor.stride()) == spec.strides and not tensor.is_conj() and not tensor.is_neg()


def in_layout_of(spec: ParameterSpec, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it, with its elements in the parameter's order."""
    if is_laid_out_as(spec, tensor):
        return tensor
    return torch.empty_strided(spec.shape, spec.strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def shaped(flat: torch.Tensor, spec: ParameterSpec, dtype: torch.dtype) -> torch.Tensor:
    """Return all flat elements of a parameter as a tensor of its shape; shares their memory."""
    whole = torch.view_as_complex(flat.view(-1, 2)) if dtype.is_complex else flat
    return whole.as_strided(spec.shape, spec.strides)


def as_pieces_dtype(flat: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """Return a piece of flat elements in the parameter's own dtype; shares their memory."""
    return torch.view_as_complex(flat.view(-1, 2)) if spec.dtype.is_complex else flat
