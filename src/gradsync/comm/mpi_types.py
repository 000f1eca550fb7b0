"""How MPI spells what torch asks for: datatypes, reductions, and memory as MPI takes it.

Knows no ranks and sends nothing. Importing this module starts MPI (mpi4py does that), so it is imported only
by what was asked to run on MPI.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from gradsync.comm.arguments import in_a_row
from gradsync.comm.combine import Bytes, Reduction, kernel_for

_DATATYPES: dict[torch.dtype, Any] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.bool: MPI.C_BOOL,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    # MPI has no name for these: it moves them as two bytes, and the arithmetic is ours
    torch.float16: MPI.UINT16_T,
    torch.bfloat16: MPI.UINT16_T,
}
_OPS: dict[Reduction, Any] = {
    Reduction.SUM: MPI.SUM,
    Reduction.AVG: MPI.SUM,  # divided afterwards
    Reduction.PRODUCT: MPI.PROD,
    Reduction.MIN: MPI.MIN,
    Reduction.MAX: MPI.MAX,
    Reduction.BAND: MPI.BAND,
    Reduction.BOR: MPI.BOR,
    Reduction.BXOR: MPI.BXOR,
}
# Arithmetic of truth values, as NumPy and torch understand it.
_BOOL_OPS: dict[Reduction, Any] = {
    Reduction.SUM: MPI.LOR,
    Reduction.PRODUCT: MPI.LAND,
    Reduction.MIN: MPI.LAND,
    Reduction.MAX: MPI.LOR,
    Reduction.BAND: MPI.LAND,
    Reduction.BOR: MPI.LOR,
    Reduction.BXOR: MPI.LXOR,
}
_HALVES = (torch.float16, torch.bfloat16)
_made: dict[tuple[Reduction, torch.dtype], Any] = {}  # MPI allows a program only a few operations of its own


def raw(tensor: Tensor) -> Bytes:
    """The memory of a contiguous tensor."""
    memory: Bytes = in_a_row(tensor.detach()).view(torch.uint8).numpy()
    return memory


def typed(tensor: Tensor) -> list[Any]:
    """A contiguous tensor as MPI takes it where it has to calculate."""
    return [raw(tensor), tensor.numel(), _DATATYPES[tensor.dtype]]


def moved(memory: Bytes) -> list[Any]:
    """Memory as MPI takes it where it only moves bytes."""
    return [memory, memory.size, MPI.BYTE]


def reduction_op(reduction: Reduction, dtype: torch.dtype) -> Any:
    """The MPI operation that combines two tensors of this dtype.

    Raises:
        ConfigError: the reduction makes no sense for the dtype.
    """
    kernel_for(reduction, dtype)  # refuses what makes no sense
    if dtype is torch.bool:
        return _BOOL_OPS[reduction]
    if dtype not in _HALVES:
        return _OPS[reduction]
    plain = Reduction.SUM if reduction is Reduction.AVG else reduction
    if (plain, dtype) not in _made:
        _made[plain, dtype] = MPI.Op.Create(_combine_with(plain, dtype), commute=True)
    return _made[plain, dtype]


def _combine_with(reduction: Reduction, dtype: torch.dtype) -> Callable[[Any, Any, Any], None]:
    kernel = kernel_for(reduction, dtype)

    def combine(incoming: Any, result: Any, _: Any) -> None:
        if incoming.nbytes:
            first = torch.frombuffer(incoming, dtype=dtype)
            second = torch.frombuffer(result, dtype=dtype)
            kernel.combine(first, second, second)

    return combine


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """The bytes of contiguous tensors that lie one after the other in memory, as one tensor; else None."""
    first = tensors[0]
    address = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != address or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        address += tensor.numel() * tensor.element_size()
    start = first.data_ptr() - first.untyped_storage().data_ptr()
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(first.untyped_storage(), start, (address - first.data_ptr(),))  # type: ignore[call-overload, no-any-return]
