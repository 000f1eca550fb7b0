"""The arguments of a process group's operations: taken apart, checked, and made contiguous.

Everything here raises ``ConfigError`` before anything is sent, so a wrong call leaves the group as it was.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradsync.errors import ConfigError


def single(tensors: Any, operation: str) -> Tensor:
    """The one tensor of a list (or the tensor itself)."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ConfigError(f"{operation} takes one tensor a rank, not {len(tensors)}")
    return tensors[0]  # type: ignore[no-any-return]


def inner_list(tensors: Any) -> list[Tensor]:
    """The list of tensors in a list of lists that holds one (or the list itself)."""
    return list(tensors[0] if tensors and isinstance(tensors[0], (list, tuple)) else tensors)


def seconds_and_wait(opts: Any, timeout: timedelta | None, default_s: float) -> tuple[float, bool]:
    """The timeout of an operation, and whether its caller waits for it at once."""
    if opts is None or not hasattr(opts, "asyncOp"):
        return (default_s if timeout is None else timeout.total_seconds()), False
    timeout_s = opts.timeout.total_seconds()  # not positive: not set
    return (timeout_s if timeout_s > 0 else default_s), not opts.asyncOp


def reduce_op(opts: Any) -> Any:
    """The reduction in options, or given in their place."""
    return ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def root_rank(opts: Any, num_ranks: int) -> int:
    """The root in options, or given in their place."""
    root = int(getattr(opts, "rootRank", opts or 0))
    if not 0 <= root < num_ranks:
        raise ConfigError(f"the root must be a rank of the group, 0 to {num_ranks - 1}, not {root}")
    return root


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself if its memory is all there is to it, else a contiguous copy."""
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"a process group for CPU tensors was given one on {tensor.device}; use NCCL for it, or copy it to the CPU"
        )
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format)


def in_a_row(tensor: Tensor) -> Tensor:
    """The elements of a contiguous tensor as one row; a single one may have come with any stride."""
    return tensor.as_strided((tensor.numel(),), (1,))


def equal_parts(flat: Tensor, num_ranks: int) -> list[Tensor]:
    """A contiguous tensor cut into equal parts, one a rank."""
    return list(flat.detach().reshape(num_ranks, -1).unbind()) if flat.numel() else [flat] * num_ranks


def cut_rows(flat: Tensor, sizes: Sequence[int], num_ranks: int, what: str) -> list[Tensor]:
    """A contiguous tensor cut along its first dimension, into equal parts if no sizes are given."""
    num_rows = flat.shape[0] if flat.dim() else 1
    if not sizes and num_rows % num_ranks:
        raise ConfigError(
            f"all_to_all_single without sizes cuts the first dimension of the {what} into equal parts, one a "
            f"rank: {num_rows} is not divisible by {num_ranks}"
        )
    sizes = list(sizes) or [num_rows // num_ranks] * num_ranks
    if len(sizes) != num_ranks or sum(sizes) != num_rows:
        raise ConfigError(
            f"the {what} sizes of all_to_all_single must be {num_ranks} numbers, one a rank, with the sum "
            f"{num_rows}, not {sizes}"
        )
    return list(torch.split(flat.detach(), sizes))


def check_total(operation: str, what: str, whole: Tensor, part: Tensor, num_ranks: int) -> None:
    """``whole`` must hold ``part`` once a rank."""
    if whole.dtype != part.dtype or whole.numel() != part.numel() * num_ranks:
        raise ConfigError(
            f"the {what} of {operation} must hold {num_ranks} times {part.numel()} elements of {part.dtype}, "
            f"not {whole.numel()} of {whole.dtype}"
        )


def check_count(operation: str, what: str, tensors: Sequence[Tensor], num_ranks: int) -> None:
    """There must be one tensor a rank."""
    if len(tensors) != num_ranks:
        raise ConfigError(f"{operation} needs {num_ranks} {what} tensors, one a rank, not {len(tensors)}")


def check_list(operation: str, what: str, tensors: Sequence[Tensor], part: Tensor, num_ranks: int) -> None:
    """There must be one tensor a rank, each like ``part``."""
    check_count(operation, what, tensors, num_ranks)
    for index, tensor in enumerate(tensors):
        if tensor.dtype != part.dtype or tensor.numel() != part.numel():
            raise ConfigError(
                f"{what} tensor {index} of {operation} must hold {part.numel()} elements of {part.dtype}, "
                f"not {tensor.numel()} of {tensor.dtype}"
            )


def padded_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """The tensor with rows of zeros added at its end."""
    result = tensor.new_zeros((num_rows, *tensor.shape[1:]))
    result[: tensor.shape[0]] = tensor
    return result
