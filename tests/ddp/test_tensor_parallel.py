"""Data parallel around tensor parallel: parameters are DTensors, replicas are rows of a 2 x 2 mesh."""

from typing import Any

import pytest
import torch
from reference import OneProcess, adamw, in_quarters, sgd, sq, unsynced, whole_numbers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradsync import DistributedDataParallel
from rank_pool import RankPool


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.ones(4))
        self.spare = nn.Linear(4, 4)
        in_quarters(self)

    def forward(self, x: torch.Tensor, use_spare: bool = False) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x))) * self.scale
        return y + self.spare(x) if use_spare else y


def _program(model: nn.Module, replica: int, step: int) -> None:
    """A micro-step without synchronisation, then one with; one replica uses another layer in step 1."""
    x = whole_numbers(3, 4, key=(replica, step))
    with unsynced(model):
        sq(model(x)).backward()
    sq(model(x.flip(0) + 1, step == 1 and replica == 0)).backward()


def _two_by_two(rank: int, world: int, arguments: dict[str, Any], by_mesh: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    module = parallelize_module(_FeedForward(), mesh["shards"], plan)
    where = {"device_mesh": mesh["replicas"]} if by_mesh else {"process_group": mesh["replicas"].get_group()}
    ddp = DistributedDataParallel(module, **where, **arguments)
    reference = OneProcess(_FeedForward(), 2, adamw())
    optimizer = adamw()(ddp.parameters())
    for step in range(3):
        _program(ddp, mesh["replicas"].get_local_rank(), step)
        reference.run(_program, step)
        for (name, p), q in zip(ddp.module.named_parameters(), reference.module.parameters(), strict=True):
            assert isinstance(p, DTensor) == name.startswith(("up", "down")), name
            assert (p.grad is None) == (q.grad is None), f"step {step}: {name}"
            _compare(p.grad, q.grad, f"step {step}: gradient of {name}")
        for each in (optimizer, reference.optimizer):
            each.step()
            each.zero_grad()
        for (name, p), q in zip(ddp.module.named_parameters(), reference.module.parameters(), strict=True):
            _compare(p.detach(), q.detach(), f"step {step}: {name}")


def _compare(got: torch.Tensor | None, want: torch.Tensor | None, what: str) -> None:
    if got is None or want is None:
        return
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(whole, want, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("by_mesh", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb": 1e-6}])
def test_tensor_parallel_inside(ranks4: RankPool, arguments: dict[str, Any], by_mesh: bool) -> None:
    ranks4(_two_by_two, arguments, by_mesh)


def _other_values(rank: int, world: int) -> None:
    """Every replica starts from the shards of the first one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    replica, shard = mesh.get_coordinate()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    module = parallelize_module(in_quarters(_FeedForward(), seed=0), mesh["shards"], plan)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1 + replica)
    DistributedDataParallel(module, process_group=mesh["replicas"].get_group()).verify_replicas()
    for p, q in zip(module.parameters(), in_quarters(_FeedForward(), seed=0).parameters(), strict=True):
        _compare(p.detach(), q.detach(), "start")


def test_replicas_start_equal(ranks4: RankPool) -> None:
    ranks4(_other_values)


def _sgd_keeps_dtensors(rank: int, world: int) -> None:
    """Gradients are DTensors with their parameter's layout, so clipping and optimizers see what they expect."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    module = parallelize_module(_FeedForward(), mesh["shards"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ddp = DistributedDataParallel(module, process_group=mesh["replicas"].get_group())
    _program(ddp, mesh["replicas"].get_local_rank(), 0)
    weight = module.up.weight
    assert isinstance(weight.grad, DTensor)
    assert weight.grad.placements == weight.placements
    assert weight.grad.shape == weight.shape
    sgd()(ddp.parameters()).step()


def test_gradients_are_dtensors(ranks4: RankPool) -> None:
    ranks4(_sgd_keeps_dtensors)
