"""What the tests of the shm backend share: its groups in the ranks of a pool."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradsync.comm import shm


def new_group(timeout_s: float = 20.0, ranks: list[int] | None = None) -> Any:
    shm.register()
    return dist.new_group(ranks, backend="shm", timeout=timedelta(seconds=timeout_s))


@contextmanager
def shm_group(timeout_s: float = 20.0, ranks: list[int] | None = None) -> Iterator[Any]:
    """A shm group of all ranks (or some) for one job."""
    group = new_group(timeout_s, ranks)
    try:
        yield group
    finally:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def numbers(rank: int, shape: tuple[int, ...] | int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Values that differ between ranks; sums and products of a few of them are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * rank + salt)
    values = torch.randint(
        0, 2 if dtype == torch.bool else 4, (shape,) if isinstance(shape, int) else shape, generator=generator
    )
    return values.to(dtype)
