"""Ranks that have less or other work than their peers: lone evaluation, skipped steps, failures.

A rank that waits for a collective that never comes gives up after the group's time-out, which is short here.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import (
    OneProcess,
    TwoLayers,
    assert_equal_replicas,
    assert_same_state,
    batch,
    digest,
    impatient_group,
    in_quarters,
    plain,
    raised,
    sgd,
    sq,
    train_alike,
    whole_numbers,
)
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankFailure, RankPool

_LR = 0.25
# More than the group's time-out and the fixed costs of a job.
_PATIENCE_S = 90.0


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_LR)


def _train_step(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    plain(ddp, rank, step)
    optimizer.step()


class _Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(x))


def _towards_targets(model: nn.Module, rank: int, step: int) -> None:
    target = whole_numbers(4, 2, key=(rank, 77))
    sq(model(batch(rank, step, rows=4)) - target).backward()


def _lone_evaluation(rank: int, world: int, trained: int) -> str:
    """Rank 0 evaluates alone in step ``trained``, between forward and backward as well as between steps."""
    ddp = DistributedDataParallel(_Normalised())
    reference = OneProcess(_Normalised(), world, sgd(_LR))
    optimizer = _optimizer(ddp)
    for step in range(3):
        optimizer.zero_grad()
        target = whole_numbers(4, 2, key=(rank, 77))
        loss = sq(ddp(batch(rank, step, rows=4)) - target)
        if step == trained and rank == 0:
            _evaluate(ddp)
        loss.backward()
        if step == trained and rank == 0:
            _evaluate(ddp)
        if step == trained:
            dist.barrier()
        optimizer.step()
        reference.train(_towards_targets, step)
    assert_same_state(reference.module, ddp.module) if rank == 0 else None
    return digest(ddp.module)


@torch.no_grad()
def _evaluate(ddp: nn.Module) -> None:
    ddp.eval()
    for number in range(3):
        ddp(batch(0, 50 + number))
    ddp.train()


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_evaluation_on_one_rank_only(ranks: RankPool, trained: int) -> None:
    assert_equal_replicas(ranks(_lone_evaluation, trained))


def _skip_together(model: nn.Module, rank: int, step: int) -> None:
    """In step 2 the loss of rank 1 is not a number, and no rank runs a backward."""
    output = model(batch(rank, step))
    if step != 2:
        sq(output).backward()


def _group_skips(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(TwoLayers())
    optimizer = _optimizer(ddp)
    reference = OneProcess(TwoLayers(), world, sgd(_LR))
    for step in range(5):
        optimizer.zero_grad()
        loss = sq(ddp(batch(rank, step))) * (float("nan") if (rank, step) == (1, 2) else 1.0)
        is_bad = torch.tensor([float(loss.isnan())])
        dist.all_reduce(is_bad, dist.ReduceOp.MAX)
        if not is_bad.item():
            loss.backward()
            optimizer.step()
        reference.train(_skip_together, step)
    assert_same_state(ddp.module, reference.module)
    return digest(ddp.module)


def test_a_step_that_all_ranks_agree_to_skip(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_group_skips))


class _InAnyOrder(nn.Module):
    """Three layers that run in the order that the caller gives, so that gradients arrive in the opposite one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        in_quarters(self)

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        for name in order:
            x = torch.tanh(getattr(self, name)(x))
        return x


def _opposite_orders(model: nn.Module, rank: int, step: int) -> None:
    sq(model(batch(rank, step), ("abc", "cba")[rank])).backward()


def test_gradients_arrive_in_another_order_on_each_rank(ranks: RankPool) -> None:
    arguments = {"steps": 5, "lr": _LR, "exact": True, "bucket_cap_mb": 1e-6}
    assert_equal_replicas(ranks(train_alike, _InAnyOrder, _opposite_orders, **arguments))


def _other_bucket_limits(rank: int, world: int) -> str:
    return raised(lambda: DistributedDataParallel(TwoLayers(), bucket_cap_mb=(25, 1e-6)[rank]))


def test_bucket_limits_that_differ_are_refused(ranks: RankPool) -> None:
    for text in ranks(_other_bucket_limits):
        assert "bucket" in text


def _rank_1_stops(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(TwoLayers(), process_group=impatient_group(world))
    optimizer = _optimizer(ddp)
    for step in range((5, 3)[rank]):
        _train_step(ddp, optimizer, rank, step)


def _rank_1_skips_a_step(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(TwoLayers(), process_group=impatient_group(world))
    optimizer = _optimizer(ddp)
    for step in range(5):
        if (rank, step) != (1, 2):
            _train_step(ddp, optimizer, rank, step)


@pytest.mark.parametrize("program", [_rank_1_stops, _rank_1_skips_a_step])
def test_without_join_the_waiting_rank_gets_an_error(ranks: RankPool, program: Any) -> None:
    waiting, other = ranks.run_expecting(program, timeout_s=_PATIENCE_S)
    assert isinstance(waiting, RankFailure)
    assert waiting.type_name != "Died"
    assert other is None


def _rank_1_raises_in_forward(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(_MayRaise(), process_group=impatient_group(world))
    optimizer = _optimizer(ddp)
    for step in range(5):
        ddp.module.is_bad = (rank, step) == (1, 2)
        _train_step(ddp, optimizer, rank, step)


class _MayRaise(TwoLayers):
    is_bad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_bad:
            raise ValueError("bad sample 4711")
        return super().forward(x)


def test_an_exception_in_forward_on_one_rank_stops_the_others(ranks: RankPool) -> None:
    waiting, guilty = ranks.run_expecting(_rank_1_raises_in_forward, timeout_s=_PATIENCE_S)
    assert guilty.type_name == "ValueError"
    assert "bad sample 4711" in guilty.text
    assert isinstance(waiting, RankFailure)
    assert waiting.type_name != "Died"


def _raise_and_clean_up(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(TwoLayers(), process_group=impatient_group(world))
    optimizer = _optimizer(ddp)
    try:
        for step in range(5):
            if (rank, step) == (1, 2):
                raise ValueError("enough")
            _train_step(ddp, optimizer, rank, step)
    finally:
        dist.destroy_process_group()


def test_a_failing_rank_can_destroy_the_group(ranks: RankPool) -> None:
    waiting, guilty = ranks.run_expecting(_raise_and_clean_up, timeout_s=_PATIENCE_S)
    assert guilty.type_name == "ValueError"
    assert isinstance(waiting, RankFailure)
    assert waiting.type_name != "Died"
