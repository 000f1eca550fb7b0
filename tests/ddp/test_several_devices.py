"""A module whose parameters lie on several devices of its rank: as autograd runs it, with a thread for each of them."""

import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from gradsync import DistributedDataParallel as DDP


def spread_as_told(rank: int, world: int) -> list[tuple[int, int]]:
    """The engine on one device, told that there are several; what had arrived when each bucket left, in two passes."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    ddp = DDP(net, bucket_cap_mb=1e-6)
    reducer, arrived, seen = ddp.reducer, [], []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: arrived.append(1))
    reducer.is_spread = True
    start = reducer._start
    reducer._start = lambda bucket: (seen.append((bucket.number, len(arrived))), start(bucket))[1]  # type: ignore[method-assign]
    for _ in range(2):
        arrived.clear()
        x = torch.full((2, 4), rank + 1.0)
        ddp(x).square().sum().backward()
        mean = [torch.zeros(4, 4) for _ in range(3)]
        for other in range(world):
            loss = net(torch.full((2, 4), other + 1.0)).square().sum()
            for total, grad in zip(mean, torch.autograd.grad(loss, list(net.parameters())), strict=True):
                total += grad / world
        for parameter, expected in zip(net.parameters(), mean, strict=True):
            torch.testing.assert_close(parameter.grad, expected)
        ddp.zero_grad()
    return seen


def test_buckets_leave_in_order_when_backward_is_over(ranks: Any) -> None:
    for seen in ranks(spread_as_told):
        assert len(seen) == 6
        assert {number_arrived for _, number_arrived in seen} == {3}
        assert [number for number, _ in seen] == [*range(3), *range(3)]


def begin_on_two_threads(rank: int, world: int) -> int:
    reducer = DDP(nn.Linear(2, 2)).reducer
    opened: list[threading.Thread] = []

    def begin() -> bool:
        time.sleep(0.05)  # the other thread comes meanwhile
        thread = threading.current_thread()
        opened.append(thread)
        reducer._counts, reducer._expected = bytearray(2), None
        reducer._pass = weakref.ref(thread)  # type: ignore[assignment]
        return True

    reducer._begin_pass = begin  # type: ignore[method-assign]
    threads = [threading.Thread(target=reducer.on_gradient, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(opened)


def test_a_pass_is_opened_once_whoever_comes_first(ranks: Any) -> None:
    assert ranks(begin_on_two_threads) == [1, 1]


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64).cuda(0)
        self.second = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda(1)
        self.aside = nn.Linear(64, 64).cuda(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.cuda(0))).cuda(1)) + self.aside(x.cuda(0)).cuda(1)


def _train_spread(rank: int, world: int, store: str) -> None:
    # gloo, since two ranks share the devices
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    net = Spread()
    ddp = DDP(net, bucket_cap_mb=0.01)
    assert {bucket.plan.device for bucket in ddp.reducer.buckets} == {torch.device("cuda", 0), torch.device("cuda", 1)}
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(5):
        batches = [torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(world)]
        losses = [net(x).square().mean() for x in batches]
        expected = torch.autograd.grad(sum(losses) / world, list(net.parameters()))  # type: ignore[arg-type]
        optimizer.zero_grad()
        ddp(batches[rank]).square().mean().backward()
        for parameter, wanted in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-5)
        optimizer.step()
    ddp.verify_replicas()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_gradients_on_two_devices_of_each_rank_are_those_of_one_process(tmp_path: Path) -> None:
    mp.spawn(_train_spread, (2, str(tmp_path / "store")), 2)
