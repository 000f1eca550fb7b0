"""The engine on CUDA devices: NCCL carries the buckets, a small gloo group the control words."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


class Branching(nn.Module):
    """Ranks may use other layers, and one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(64, 64)
        self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.norm(self.branches[branch](torch.relu(self.trunk(x))))


def _gradients_of_one_process(
    state: dict, batches: list[torch.Tensor], branches: list[int]
) -> list[torch.Tensor | None]:
    sums: list[torch.Tensor | None] = []
    for x, branch in zip(batches, branches, strict=True):
        net = Branching().cuda()
        net.load_state_dict(state)
        net(x, branch).square().mean().backward()
        grads = [p.grad for p in net.parameters()]
        sums = (
            grads
            if not sums
            else [b if a is None else a if b is None else a + b for a, b in zip(sums, grads, strict=True)]
        )
    return [None if g is None else g / len(batches) for g in sums]


def _train(rank: int, world: int, store: str) -> None:
    from gradsync import DistributedDataParallel, init_process_group

    torch.cuda.set_device(rank)
    init_process_group(store=dist.FileStore(store, world), rank=rank, world_size=world)
    torch.manual_seed(rank)
    net = Branching().cuda()
    ddp = DistributedDataParallel(net, device_ids=[rank], bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        branches = [(step + r) % 2 for r in range(world)]
        generators = [torch.Generator().manual_seed(100 * step + r) for r in range(world)]
        batches = [torch.randn(8, 64, generator=g).cuda() for g in generators]
        expected = _gradients_of_one_process(net.state_dict(), batches, branches)
        optimizer.zero_grad()
        ddp(batches[rank], branches[rank]).square().mean().backward()
        for parameter, wanted in zip(net.parameters(), expected, strict=True):
            assert (parameter.grad is None) == (wanted is None)
            if wanted is not None:
                torch.testing.assert_close(
                    parameter.grad, wanted, rtol=1e-4, atol=1e-5
                )  # atomics reorder sums on a GPU
        optimizer.step()
        ddp.sync_buffers()
    ddp.verify_replicas()
    dist.destroy_process_group()


def test_gradients_on_gpus_are_those_of_one_process(tmp_path: Path) -> None:
    world = min(torch.cuda.device_count(), 2)
    mp.spawn(_train, (world, str(tmp_path / "store")), world)
