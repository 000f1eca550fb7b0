"""The sharded optimizer trains as a plain one does: the same parameters, step by step, for every kind of optimizer."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from random_programs import Program, train
from reference import assert_equal_replicas, assert_near, plain
from sharded_pair import ADAMW, MOMENTUM, Uneven, assert_alike, in_two_groups, pair, train_alike
from test_random_programs import _programs, _settings
from torch import nn

from gradsync.ddp import exchange, sharding
from rank_pool import RankPool


@pytest.mark.parametrize(
    "optimizer",
    [
        (torch.optim.SGD, {"lr": 0.002}),
        MOMENTUM,
        ADAMW,
        (torch.optim.AdamW, {**ADAMW[1], "fused": True}),
        (torch.optim.AdamW, {**ADAMW[1], "foreach": True, "amsgrad": True}),
        (torch.optim.Adam, {"lr": 0.02, "eps": 1e-4}),
        (torch.optim.RMSprop, {"lr": 0.002, "eps": 1e-2, "momentum": 0.5}),
        (torch.optim.Adagrad, {"lr": 0.02, "eps": 1e-4}),
    ],
    ids=["sgd", "momentum", "adamw", "adamw-fused", "amsgrad", "adam", "rmsprop", "adagrad"],
)
def test_twenty_steps_of_two_ranks(ranks: RankPool, optimizer: Any) -> None:
    assert_equal_replicas(ranks(train_alike, build=Uneven, optimizer=optimizer))


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW])
def test_twenty_steps_of_three_ranks(ranks3: RankPool, optimizer: Any) -> None:
    assert_equal_replicas(ranks3(train_alike, build=partial(Uneven, 401), optimizer=optimizer))


def test_groups_schedule_and_clipping_together(ranks3: RankPool) -> None:
    how = {"build": Uneven, "groups": in_two_groups, "max_norm": 0.2, "has_schedule": True}
    assert_equal_replicas(ranks3(train_alike, **how))


@pytest.mark.parametrize("cap", [1e-6, 0.001, None])
def test_any_size_of_buckets(ranks: RankPool, cap: float | None) -> None:
    assert_equal_replicas(ranks(train_alike, steps=4, bucket_cap_mb=cap, groups=in_two_groups))


@pytest.mark.parametrize("reduction", ["sum", "weighted"])
def test_other_reductions(ranks: RankPool, reduction: str) -> None:
    assert_equal_replicas(ranks(_other_reduction, reduction))


def _other_reduction(rank: int, world: int, reduction: str) -> str:
    def program(model: Any, rank: int, step: int) -> None:
        if reduction == "weighted" and isinstance(model, nn.parallel.DistributedDataParallel):
            model.add_gradient_weight(rank + 1)
        plain(model, rank, step)

    divisor = 1.0 if reduction == "sum" else world * (world + 1) / 2
    return train_alike(rank, world, program, 6, divisor=divisor, optimizer=MOMENTUM, reduction=reduction)


@pytest.mark.parametrize("way", [exchange.NativeExchange, exchange.AllReduceExchange, exchange.PairwiseExchange])
def test_every_way_to_exchange_slices(ranks3: RankPool, way: Any) -> None:
    assert_equal_replicas(ranks3(_with_exchange, way))


def _with_exchange(rank: int, world: int, way: Any) -> str:
    chosen = sharding.choose_exchange
    sharding.choose_exchange = lambda group, device: way(group)
    try:
        return train_alike(rank, world, build=Uneven, steps=4)
    finally:
        sharding.choose_exchange = chosen


def test_on_shared_memory(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_on_shared_memory))


def _on_shared_memory(rank: int, world: int) -> str:
    from gradsync.comm import shm

    shm.register()
    group = dist.new_group(backend="shm")
    result = train_alike(rank, world, build=Uneven, steps=6, process_group=group)
    dist.destroy_process_group(group)
    return result


@hypothesis_settings(_settings, max_examples=60)
@given(program=_programs(world=2))
def test_random_programs(ranks: RankPool, program: Program) -> None:
    if program.stem != "sparse tokens":
        assert_equal_replicas(ranks(train, program, is_sharded=True))


@hypothesis_settings(_settings, max_examples=15)
@given(program=_programs(world=3))
def test_random_programs_of_three_ranks(ranks3: RankPool, program: Program) -> None:
    if program.stem != "sparse tokens":
        assert_equal_replicas(ranks3(train, program, is_sharded=True))


def test_one_rank_alone(ranks: RankPool) -> None:
    ranks(_alone)


def _alone(rank: int, world: int) -> None:
    mine = [dist.new_group([r]) for r in range(world)][rank]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the group is alone is what is wanted here
        ddp, sharded, reference = pair(1, groups=in_two_groups, process_group=mine)
    for step in range(5):
        plain(ddp, 0, step)
        reference.run(plain, step)
        norm = sharded.clip_grad_norm_(0.5)
        assert_near(norm, nn.utils.clip_grad_norm_(reference.module.parameters(), 0.5), "norm")
        for each in (sharded, reference.optimizer):
            each.step()
            each.zero_grad()
        assert_alike(ddp, reference, f"step {step}")
    assert sharded.state_dict()["state"]["a.weight"]["exp_avg"].shape == (3, 3)
