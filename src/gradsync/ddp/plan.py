"""Which parameter travels in which bucket: a pure function, the same on every rank.

Knows numbers only; the tensors are in ``bucket``. A *bucket* is one flat buffer that holds the
gradients of several parameters of one dtype and device and is reduced in one collective.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

MIB = 2**20
DEFAULT_FIRST_CAP_BYTES = 1 * MIB
DEFAULT_CAP_BYTES = 25 * MIB
_DEFAULT_SHARE = 0.1
"""Of all gradients: the most that a bucket waits for by default, so that a small model does not wait for its last
gradient with nearly everything."""

_SLICE_ALIGNMENT_BYTES = 64
"""Parameters and slices start at cache lines: fast kernels ask for it, and no complex pair is cut."""

_REAL_OF_COMPLEX = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


@dataclass(frozen=True)
class ParameterSpec:
    """What the plan must know of one parameter.

    ``strides`` are those its gradient view gets: the parameter's own where its memory is dense,
    the contiguous ones elsewhere. ``is_sparse`` says that its gradient is expected to be sparse.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False

    @property
    def numel(self) -> int:
        """Number of elements, complex ones counted once."""
        return _product(self.shape)

    @property
    def flat_dtype(self) -> torch.dtype:
        """The dtype it travels in: complex numbers travel as real pairs."""
        return _REAL_OF_COMPLEX.get(self.dtype, self.dtype)

    @property
    def flat_numel(self) -> int:
        """Number of elements of the flat buffer that it takes."""
        return self.numel * (2 if self.dtype.is_complex else 1)

    @property
    def num_bytes(self) -> int:
        """Size of its gradient in bytes."""
        return self.numel * self.dtype.itemsize


def parameter_spec(name: str, parameter: torch.Tensor, is_sparse: bool = False) -> ParameterSpec:
    """Describe a parameter (a local tensor) for the plan."""
    shape = tuple(parameter.shape)
    strides = tuple(parameter.stride())
    if not is_dense(shape, strides):
        strides = _contiguous_strides(shape)
    # the user may ask for gradients in another dtype than the parameter's (torch 2.10)
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return ParameterSpec(name, shape, strides, dtype, parameter.device, is_sparse)


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: the parameters in it (by index), where each starts, and the buffer's size in elements."""

    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """All buckets in launch order, and the parameters whose sparse gradients travel after them."""

    specs: tuple[ParameterSpec, ...]
    buckets: tuple[BucketPlan, ...]
    sparse: tuple[int, ...]

    @property
    def bucket_of(self) -> list[int]:
        """For each parameter the index of its bucket; -1 for sparse ones."""
        home = [-1] * len(self.specs)
        for number, bucket in enumerate(self.buckets):
            for index in bucket.indices:
                home[index] = number
        return home


@dataclass(frozen=True)
class Slicing:
    """Buckets that are cut into slices of equal length, one a rank (see ``sharding``).

    A parameter of ``alone_bytes`` or more gets a bucket of its own, so that its gradient can travel from where
    it is, without a copy.
    """

    num_slices: int
    alone_bytes: int = 512 * 2**10


def make_plan(
    specs: Sequence[ParameterSpec],
    order: Iterable[int],
    caps_bytes: Sequence[float],
    slicing: Slicing | None = None,
) -> Plan:
    """Fill buckets with the parameters in the given order.

    A bucket is closed when its bytes reach its limit, so it overshoots by up to one parameter. The
    limits are used in order for each (dtype, device), and the last one repeats. Buckets are launched in
    the order in which they were closed; one with a float32 buffer comes last where there is one, since
    the control words ride on it.
    """
    order = list(order)
    open_members: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    open_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    num_closed: dict[tuple[torch.dtype, torch.device], int] = {}
    closed: list[list[int]] = []
    for index in order:
        spec = specs[index]
        if spec.is_sparse:
            continue
        if slicing is not None and spec.num_bytes >= slicing.alone_bytes:
            closed.append([index])
            continue
        key = (spec.flat_dtype, spec.device)
        open_members.setdefault(key, []).append(index)
        open_bytes[key] = open_bytes.get(key, 0) + spec.num_bytes
        if open_bytes[key] >= caps_bytes[min(num_closed.get(key, 0), len(caps_bytes) - 1)]:
            closed.append(open_members.pop(key))
            open_bytes[key] = 0
            num_closed[key] = num_closed.get(key, 0) + 1
    closed.extend(open_members.values())
    buckets = [_bucket_plan(specs, members, slicing) for members in closed]
    _move_float32_last(buckets)
    sparse = tuple(index for index in order if specs[index].is_sparse)
    return Plan(tuple(specs), tuple(buckets), sparse)


def plan_of(specs: Sequence[ParameterSpec], groups: Sequence[Sequence[int]], sparse: tuple[int, ...]) -> Plan:
    """Return the plan with these buckets; one whose members differ in dtype or device becomes several."""
    uniform: list[list[int]] = []
    for group in groups:
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index in group:
            by_kind.setdefault((specs[index].flat_dtype, specs[index].device), []).append(index)
        uniform += by_kind.values()
    buckets = [_bucket_plan(specs, members) for members in uniform]
    _move_float32_last(buckets)
    return Plan(tuple(specs), tuple(buckets), sparse)


def caps_from_mib(cap_mb: float | str | None, cap_mb_list: Sequence[float] | None = None) -> list[float] | None:
    """Turn the constructor's arguments (MiB) into a list of limits in bytes; None where the model decides."""
    if cap_mb_list:
        return [mb * MIB for mb in cap_mb_list]
    if cap_mb is None or isinstance(cap_mb, str):
        return None
    return [cap_mb * MIB]


def default_caps(specs: Sequence[ParameterSpec]) -> list[float]:
    """Return the limits in bytes that suit these parameters where nobody has set any."""
    share = _DEFAULT_SHARE * sum(spec.num_bytes for spec in specs)
    return [DEFAULT_FIRST_CAP_BYTES, min(max(share, DEFAULT_FIRST_CAP_BYTES), DEFAULT_CAP_BYTES)]


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill one piece of memory, each cell once (dimensions of size 1 don't matter)."""
    expected = 1
    for stride, size in sorted((st, sz) for sz, st in zip(shape, strides, strict=True) if sz != 1):
        if stride != expected:
            return size == 0 or 0 in shape
        expected *= size
    return True


def _bucket_plan(specs: Sequence[ParameterSpec], members: Sequence[int], slicing: Slicing | None = None) -> BucketPlan:
    first = specs[members[0]]
    alignment = 1 if slicing is None else slice_alignment(first.flat_dtype)
    offsets = []
    end = 0
    for index in members:
        # a complex view starts at a whole pair
        end = _round_up(end, max(alignment, 2 if specs[index].dtype.is_complex else 1))
        offsets.append(end)
        end += specs[index].flat_numel
    if slicing is not None:
        end = _round_up(end, slicing.num_slices * alignment)
    return BucketPlan(tuple(members), tuple(offsets), end, first.flat_dtype, first.device)


def slice_alignment(dtype: torch.dtype) -> int:
    """Return the number of elements whose multiples slices, and the parameters in them, start at."""
    return max(_SLICE_ALIGNMENT_BYTES // dtype.itemsize, 1)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _move_float32_last(buckets: list[BucketPlan]) -> None:
    if buckets and buckets[-1].dtype != torch.float32:
        for number in range(len(buckets) - 1, -1, -1):
            if buckets[number].dtype == torch.float32:
                buckets.append(buckets.pop(number))
                return


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
