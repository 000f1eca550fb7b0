"""Uneven numbers of batches inside ``join``: ranks that have run out shadow the others."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import (
    Branches,
    OneProcess,
    TwoLayers,
    assert_equal_replicas,
    assert_same_state,
    batch,
    digest,
    in_quarters,
    plain,
    raised,
    sgd,
    sq,
)
from torch import nn
from torch.distributed.algorithms.join import Join

from gradsync import DistributedDataParallel
from rank_pool import RankPool

_LR = 0.25


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_LR)


def _train_step(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    plain(ddp, rank, step)
    optimizer.step()


def _while_it_has_batches(lengths: tuple[int, ...]) -> Any:
    def program(model: nn.Module, rank: int, step: int) -> None:
        if step < lengths[rank]:
            plain(model, rank, step)

    return program


def _joined(rank: int, world: int, lengths: tuple[int, ...], by_initial_size: bool, cap: float | None) -> str:
    ddp = DistributedDataParallel(TwoLayers(), bucket_cap_mb=cap)
    optimizer = _optimizer(ddp)
    with ddp.join(divide_by_initial_world_size=by_initial_size):
        for step in range(lengths[rank]):
            _train_step(ddp, optimizer, rank, step)
    reference = OneProcess(TwoLayers(), world, sgd(_LR))
    for step in range(max(lengths)):
        active = sum(length > step for length in lengths)
        reference.train(_while_it_has_batches(lengths), step, None if by_initial_size else active)
    assert_same_state(ddp.module, reference.module)
    # the wrapper is whole again after the context
    _train_step(ddp, optimizer, rank, 90)
    reference.train(plain, 90)
    assert_same_state(ddp.module, reference.module, "after join:")
    return digest(ddp.module)


@pytest.mark.parametrize("cap", [None, 1e-6])
@pytest.mark.parametrize("by_initial_size", [True, False])
@pytest.mark.parametrize("lengths", [(5, 3), (3, 5), (4, 4), (2, 0)])
def test_join(ranks: RankPool, lengths: tuple[int, int], by_initial_size: bool, cap: float | None) -> None:
    assert_equal_replicas(ranks(_joined, lengths, by_initial_size, cap))


def _joined_accumulation(rank: int, world: int, lengths: tuple[int, ...]) -> str:
    ddp = DistributedDataParallel(TwoLayers())
    optimizer = _optimizer(ddp)
    with ddp.join():
        for micro in range(lengths[rank]):
            with contextlib.nullcontext() if micro % 2 else ddp.no_sync():
                sq(ddp(batch(rank, micro))).backward()
            if micro % 2:
                optimizer.step()
                optimizer.zero_grad()
    reference = OneProcess(TwoLayers(), world, sgd(_LR))

    def window(model: nn.Module, rank: int, step: int) -> None:
        for micro in range(2 * step, min(2 * step + 2, lengths[rank])):
            sq(model(batch(rank, micro))).backward()

    for step in range(max(lengths) // 2):
        reference.train(window, step)
    assert_same_state(ddp.module, reference.module)
    return digest(ddp.module)


@pytest.mark.parametrize("lengths", [(6, 2), (2, 6)])
def test_join_with_accumulation(ranks: RankPool, lengths: tuple[int, int]) -> None:
    assert_equal_replicas(ranks(_joined_accumulation, lengths))


def _halving_hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer().div_(2)
    work = dist.all_reduce(buffer, group=state, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _joined_with_hook(rank: int, world: int, lengths: tuple[int, ...]) -> str:
    ddp = DistributedDataParallel(TwoLayers())
    ddp.register_comm_hook(dist.group.WORLD, _halving_hook)
    optimizer = _optimizer(ddp)
    with ddp.join():
        for step in range(lengths[rank]):
            _train_step(ddp, optimizer, rank, step)
    reference = OneProcess(TwoLayers(), world, sgd(_LR))
    for step in range(max(lengths)):
        reference.train(_while_it_has_batches(lengths), step)
    assert_same_state(ddp.module, reference.module)
    return digest(ddp.module)


def test_join_with_a_communication_hook(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_joined_with_hook, (3, 5)))


def _first_to_end_stops_all(rank: int, world: int) -> tuple[int, str]:
    ddp = DistributedDataParallel(TwoLayers())
    optimizer = _optimizer(ddp)
    steps = 0

    def train() -> None:
        nonlocal steps
        with ddp.join(throw_on_early_termination=True):
            for step in range((5, 3)[rank]):
                _train_step(ddp, optimizer, rank, step)
                steps += 1

    text = raised(train)
    reference = OneProcess(TwoLayers(), world, sgd(_LR))
    for step in range(3):
        reference.train(plain, step)
    assert_same_state(ddp.module, reference.module)
    return steps, text


def test_join_that_stops_everybody_when_one_runs_out(ranks: RankPool) -> None:
    for steps, text in ranks(_first_to_end_stops_all):
        assert steps == 3
        assert "exhaust" in text


def _joined_on_three(rank: int, world: int, by_initial_size: bool) -> str:
    """Ranks run out one after the other, with branches that differ per rank, in tiny buckets."""
    lengths = (2, 5, 3)

    def program(model: nn.Module, rank: int, step: int) -> None:
        if step < lengths[rank]:
            sq(model(batch(rank, step), ("ab", "bc", "a")[(rank + step) % 3])).backward()

    ddp = DistributedDataParallel(Branches(), bucket_cap_mb=1e-6)
    optimizer = _optimizer(ddp)
    reference = OneProcess(Branches(), world, sgd(_LR))
    with ddp.join(divide_by_initial_world_size=by_initial_size):
        for step in range(lengths[rank]):
            optimizer.zero_grad()
            program(ddp, rank, step)
            optimizer.step()
    for step in range(max(lengths)):
        active = sum(length > step for length in lengths)
        reference.train(program, step, None if by_initial_size else active)
    assert_same_state(ddp.module, reference.module)
    return digest(ddp.module)


@pytest.mark.parametrize("by_initial_size", [True, False])
def test_join_with_branches_on_three_ranks(ranks3: RankPool, by_initial_size: bool) -> None:
    assert_equal_replicas(ranks3(_joined_on_three, by_initial_size))


class _Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(x))


def _joined_with_buffers(rank: int, world: int, lengths: tuple[int, ...]) -> list[float]:
    ddp = DistributedDataParallel(_Normalised())
    optimizer = _optimizer(ddp)
    with ddp.join():
        for step in range(lengths[rank]):
            optimizer.zero_grad()
            (sq(ddp(batch(rank, step, rows=4))) + ddp.module.a.weight.sum()).backward()
            optimizer.step()
    ddp.verify_replicas()
    mean: list[float] = ddp.module.norm.running_mean.tolist()
    return [*mean, float(ddp.module.norm.num_batches_tracked)]


@pytest.mark.parametrize("lengths", [(2, 5), (5, 2)])
def test_join_leaves_equal_buffers(ranks: RankPool, lengths: tuple[int, int]) -> None:
    first, second = ranks(_joined_with_buffers, lengths)
    assert first == second
    assert first[-1] == 5


def _joined_with_torchs_sharded_optimizer(rank: int, world: int) -> str:
    """The wrapper keeps to torch's Joinable protocol, so other joinables share its context."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns of something deprecated

    lengths = (2, 4)
    ddp = DistributedDataParallel(TwoLayers())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=_LR)
    reference = OneProcess(TwoLayers(), world, sgd(_LR))
    with Join([ddp, optimizer]):
        for step in range(lengths[rank]):
            _train_step(ddp, optimizer, rank, step)
    for step in range(max(lengths)):
        reference.train(_while_it_has_batches(lengths), step)
    assert_same_state(ddp.module, reference.module)
    return digest(ddp.module)


def test_join_with_another_joinable(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_joined_with_torchs_sharded_optimizer, warnings_as_errors=False))


def _evaluates_inside(rank: int, world: int) -> str:
    """Forwards that train nothing do not count as iterations."""
    lengths = (2, 4)
    ddp = DistributedDataParallel(TwoLayers())
    optimizer = _optimizer(ddp)
    reference = OneProcess(TwoLayers(), world, sgd(_LR))
    with ddp.join():
        for step in range(lengths[rank]):
            _train_step(ddp, optimizer, rank, step)
            if rank == 1:
                with torch.no_grad():
                    ddp(batch(rank, step))
                ddp.eval()
                ddp(batch(rank, step))
                ddp.train()
    for step in range(max(lengths)):
        reference.train(_while_it_has_batches(lengths), step)
    assert_same_state(ddp.module, reference.module)
    return digest(ddp.module)


def test_join_with_evaluation_inside(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_evaluates_inside))


def _switched_off(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(TwoLayers())
    optimizer = _optimizer(ddp)
    reference = OneProcess(TwoLayers(), world, sgd(_LR))
    with ddp.join(enable=False):
        for step in range(2):
            _train_step(ddp, optimizer, rank, step)
            reference.train(plain, step)
    assert_same_state(ddp.module, reference.module)
    return digest(ddp.module)


def test_join_can_be_switched_off(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_switched_off))


def _two_passes_a_step(rank: int, world: int, reduction: str, divides_by_all: bool) -> list[float] | None:
    """Rank 0 has no batch at all; the others' gradient of a first pass stays what it was in the second."""
    ddp = DistributedDataParallel(nn.Linear(2, 2, bias=False), reduction=reduction)
    with ddp.join(divide_by_initial_world_size=divides_by_all):
        for value in (1.0, 10.0) if rank else ():
            ddp(torch.full((1, 2), value)).sum().backward()
            with ddp.no_sync():
                ddp(torch.full((1, 2), value)).sum().backward()
        if rank:
            ddp(torch.full((1, 2), 100.0)).sum().backward()
    return ddp.module.weight.grad.flatten().tolist() if rank else None


@pytest.mark.parametrize(
    ("reduction", "divides_by_all", "expected"), [("sum", True, 122), ("mean", True, 61), ("mean", False, 122)]
)
def test_what_was_reduced_stays_beside_a_rank_that_has_joined(
    ranks: RankPool, reduction: str, divides_by_all: bool, expected: float
) -> None:
    assert ranks(_two_passes_a_step, reduction, divides_by_all) == [None, [expected] * 4]


def _mean_with_something_on_top(rank: int, world: int) -> list[float]:
    """A window that begins before the context and ends in it."""
    ddp = DistributedDataParallel(nn.Linear(2, 2, bias=False))
    ddp(torch.ones(1, 2)).sum().backward()
    with ddp.no_sync():
        ddp(torch.full((1, 2), 10.0 * (rank + 1))).sum().backward()
    with ddp.join():
        ddp(torch.full((1, 2), 100.0)).sum().backward()
    result: list[float] = ddp.module.weight.grad.flatten().tolist()
    return result


def test_a_window_may_begin_before_the_context(ranks: RankPool) -> None:
    assert ranks(_mean_with_something_on_top) == [[116.0] * 4] * 2
