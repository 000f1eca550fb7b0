"""What the tests of the shm and MPI backends share: groups in the ranks of a pool, and a small model to train."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradsync.comm import shm
from whole_batch import train_on_all_batches


def new_group(timeout_s: float = 90.0, ranks: list[int] | None = None) -> Any:
    shm.register()
    return dist.new_group(ranks, backend="shm", timeout=timedelta(seconds=timeout_s))


@contextmanager
def shm_group(timeout_s: float = 90.0, ranks: list[int] | None = None) -> Iterator[Any]:
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


def make_model(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def train(model: nn.Module, rank: int, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def averaged(world: int, steps: int = 3) -> list[torch.Tensor]:
    """The parameters after training one process on the batches of all ranks."""
    model = make_model()
    train_on_all_batches(model, batch, world, steps)
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_close(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
