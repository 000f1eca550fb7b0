"""Element-wise reductions on raw memory: which dtypes and operations there are, and their kernels.

Memory is handed around as flat ``uint8`` NumPy arrays; only the kernels know what is in it. NumPy does the
arithmetic where it has the dtype (half the cost of a torch call, one thread, no lock held), torch where it
does not (bfloat16) or is slow (float16). Knows nothing of ranks beyond their order, and of no process group.

[Note: Order of summation] Parts are combined from the lowest rank to the highest, whoever does it, so every
run and every rank computes the same bits.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import ReduceOp

from gradsync.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)

CHUNK_BYTES = 256 * 1024  # what one kernel call works on: stays in the second-level cache between two calls


class Reduction(IntEnum):
    """What is computed of the elements that the ranks hold."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


# torch's own enumeration hashes to small numbers that are all different, which is far cheaper than comparing.
_BY_HASH = {hash(ReduceOp(getattr(ReduceOp, kind.name))): kind for kind in Reduction}

_UFUNCS = {
    Reduction.SUM: np.add,
    Reduction.AVG: np.add,
    Reduction.PRODUCT: np.multiply,
    Reduction.MIN: np.minimum,
    Reduction.MAX: np.maximum,
    Reduction.BAND: np.bitwise_and,
    Reduction.BOR: np.bitwise_or,
    Reduction.BXOR: np.bitwise_xor,
}
_TORCH_FUNCTIONS: dict[Reduction, Callable[..., Any]] = {
    Reduction.SUM: torch.add,
    Reduction.AVG: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
}

NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
    torch.bool: np.bool_,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
}
_TORCH_DTYPES = (torch.float16, torch.bfloat16)
_BITWISE = (Reduction.BAND, Reduction.BOR, Reduction.BXOR)
_ORDERED = (Reduction.MIN, Reduction.MAX)

# Every dtype has a small number by which ranks tell each other what they hold.
_DTYPES_BY_NAME = {name: value for name, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)}
DTYPE_CODES = {dtype: code for code, dtype in enumerate(dict.fromkeys(_DTYPES_BY_NAME.values()), start=1)}
DTYPE_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in DTYPE_CODES.items()}


class Kernel(Protocol):
    """Combines flat typed arrays; ``out`` may be one of the inputs."""

    def typed(self, raw: Bytes) -> Any:
        """The same memory as an array of elements."""

    def combine(self, first: Any, second: Any, out: Any) -> None:
        """``out = first (+) second``, element by element."""

    def finish(self, out: Any, num_parts: int) -> None:
        """What is left to do once all parts are combined (the division of an average)."""

    def copy(self, source: Any, target: Any) -> None:
        """``target = source``."""


class _NumpyKernel:
    def __init__(self, reduction: Reduction, dtype: torch.dtype) -> None:
        self._dtype = NUMPY_DTYPES[dtype]
        if dtype.is_complex and reduction in (Reduction.SUM, Reduction.AVG):
            self._dtype = NUMPY_DTYPES[dtype.to_real()]  # the division of an average is then one of real numbers
        self._ufunc = _UFUNCS[reduction]
        self._is_average = reduction is Reduction.AVG

    def typed(self, raw: Bytes) -> Any:
        return raw.view(self._dtype)

    def combine(self, first: Any, second: Any, out: Any) -> None:
        self._ufunc(first, second, out=out)

    def finish(self, out: Any, num_parts: int) -> None:
        if self._is_average:
            np.true_divide(out, num_parts, out=out)

    def copy(self, source: Any, target: Any) -> None:
        np.copyto(target, source)


class _TorchKernel:
    def __init__(self, reduction: Reduction, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._function = _TORCH_FUNCTIONS[reduction]
        self._is_average = reduction is Reduction.AVG

    def typed(self, raw: Bytes) -> Any:
        # torch has no read-only tensors, and warns of a read-only source
        return torch.from_numpy(raw if raw.flags.writeable else raw.copy()).view(self._dtype)

    def combine(self, first: Any, second: Any, out: Any) -> None:
        self._function(first, second, out=out)

    def finish(self, out: Any, num_parts: int) -> None:
        if self._is_average:
            out.div_(num_parts)

    def copy(self, source: Any, target: Any) -> None:
        target.copy_(source)


def reduction_of(op: Any) -> Reduction:
    """The reduction that a ``torch.distributed.ReduceOp`` asks for."""
    kind = _BY_HASH.get(hash(op))
    if kind is None:
        raise ConfigError(
            f"the reduction {op} is not supported here; supported are {', '.join(kind.name for kind in Reduction)}"
        )
    return kind


def kernel_for(reduction: Reduction, dtype: torch.dtype) -> Kernel:
    """The kernel for this reduction of this dtype (made once).

    Raises:
        ConfigError: the reduction makes no sense for the dtype, or the dtype cannot be computed with.
    """
    kernel = _KERNELS.get((reduction, dtype))
    if kernel is None:
        _check(reduction, dtype)
        make = _TorchKernel if dtype in _TORCH_DTYPES else _NumpyKernel
        kernel = _KERNELS[reduction, dtype] = make(reduction, dtype)
    return kernel


_KERNELS: dict[tuple[Reduction, torch.dtype], Kernel] = {}


def _check(reduction: Reduction, dtype: torch.dtype) -> None:
    if dtype not in NUMPY_DTYPES and dtype not in _TORCH_DTYPES:
        raise ConfigError(f"tensors of {dtype} can be copied between ranks but not reduced ({reduction.name})")
    is_fractional = dtype.is_floating_point or dtype.is_complex
    if reduction in _BITWISE and is_fractional:
        raise ConfigError(f"ReduceOp.{reduction.name} works on integers and bools only, not on {dtype}")
    if reduction is Reduction.AVG and not is_fractional:
        raise ConfigError(f"ReduceOp.AVG of {dtype} would lose the fraction; use SUM and divide")
    if reduction in _ORDERED and dtype.is_complex:
        raise ConfigError(f"ReduceOp.{reduction.name} of {dtype} is not defined: complex numbers have no order")


def reduce_parts(kernel: Kernel, parts: Sequence[Bytes], targets: Sequence[Bytes], scratch: Bytes) -> None:
    """Combine ``parts`` in order and write the result to every one of ``targets``.

    All have the same length. The first target may be one of the parts (exactly the same memory); the other
    targets get their copy while the chunk is in the cache. ``scratch`` is private memory of CHUNK_BYTES.
    """
    num_bytes = parts[0].size
    with np.errstate(all="ignore"):  # infinities and NaNs are results like others
        for start in range(0, num_bytes, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, num_bytes)
            typed = [kernel.typed(part[start:stop]) for part in parts]
            out = kernel.typed(targets[0][start:stop])
            _combine_chunk(kernel, typed, out, kernel.typed(scratch[: stop - start]))
            for target in targets[1:]:
                kernel.copy(out, kernel.typed(target[start:stop]))


def _combine_chunk(kernel: Kernel, parts: list[Any], out: Any, scratch: Any) -> None:
    if len(parts) == 1:
        kernel.copy(parts[0], out)
        return
    total = parts[0]
    for part in parts[1:-1]:
        # not in ``out`` yet: it may be the memory of a part that is still to come
        kernel.combine(total, part, scratch)
        total = scratch
    kernel.combine(total, parts[-1], out)
    kernel.finish(out, len(parts))
