"""Gradient accumulation: which backwards synchronise, and what they synchronise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import (
    Branches,
    OneProcess,
    TwoLayers,
    assert_equal_replicas,
    assert_near,
    assert_same_gradients,
    batch,
    num_collectives,
    plain,
    sq,
    train_alike,
    unsynced,
)
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankPool


def _micro_step(model: nn.Module, rank: int, step: int, micro: int, scale: float = 1.0) -> None:
    (sq(model(batch(rank, step, which=micro))) * scale).backward()


def _four_in_no_sync(model: nn.Module, rank: int, step: int) -> None:
    with unsynced(model):
        for micro in range(3):
            _micro_step(model, rank, step, micro)
    _micro_step(model, rank, step, 3)


def _four_attribute_before_forward(model: Any, rank: int, step: int) -> None:
    for micro in range(4):
        model.require_backward_grad_sync = micro == 3
        _micro_step(model, rank, step, micro)


def _four_attribute_before_backward(model: Any, rank: int, step: int) -> None:
    for micro in range(4):
        loss = sq(model(batch(rank, step, which=micro)))
        model.require_backward_grad_sync = micro == 3
        loss.backward()


def _four_forwards_in_no_sync(model: nn.Module, rank: int, step: int) -> None:
    with unsynced(model):
        losses = [sq(model(batch(rank, step, which=micro))) for micro in range(4)]
        for loss in losses[:3]:
            loss.backward()
    losses[3].backward()


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-6}])
@pytest.mark.parametrize(
    "program",
    [_four_in_no_sync, _four_attribute_before_forward, _four_attribute_before_backward, _four_forwards_in_no_sync],
)
def test_ways_to_skip_the_synchronisation(ranks: RankPool, program: Any, arguments: dict[str, Any]) -> None:
    assert_equal_replicas(ranks(train_alike, TwoLayers, program, exact=True, **arguments))


def _watch_each_micro_step(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(TwoLayers())
    plain(ddp, rank, 99)
    ddp.zero_grad()
    mine = TwoLayers()
    before = num_collectives()
    with ddp.no_sync():
        for micro in range(3):
            for model in (ddp, mine):
                _micro_step(model, rank, 0, micro)
            assert_same_gradients(ddp.module, mine, f"micro-step {micro}", exact=True)
    assert num_collectives() == before
    reference = OneProcess(TwoLayers(), world)
    reference.run(_four_in_no_sync, 0)
    _micro_step(ddp, rank, 0, 3)
    assert num_collectives() > before
    assert_same_gradients(ddp.module, reference.module, "window", exact=True)


def test_gradients_are_local_and_nothing_is_sent_until_the_last_micro_step(ranks: RankPool) -> None:
    ranks(_watch_each_micro_step)


def _seven_in_threes(model: nn.Module, rank: int, step: int) -> None:
    """The last window of an epoch of seven micro-batches is shorter, and its losses weigh more."""
    micros = range(3 * step, min(3 * step + 3, 7))
    for micro in micros:
        if micro == micros[-1]:
            _micro_step(model, rank, 0, micro, 1 / len(micros))
        else:
            with unsynced(model):
                _micro_step(model, rank, 0, micro, 1 / len(micros))


def test_a_last_shorter_window(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, TwoLayers, _seven_in_threes, steps=3, lr=0.25, exact=True))


def _off_by_one(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(TwoLayers())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.25)
    _micro_step(ddp, rank, 0, 0)
    with ddp.no_sync():
        _micro_step(ddp, rank, 0, 1)
        _micro_step(ddp, rank, 0, 2)
    optimizer.step()


def test_a_step_on_unsynchronised_gradients_is_reported(ranks: RankPool) -> None:
    for rank, (_, warned) in enumerate(ranks.run_with_warnings(_off_by_one)):
        (text,) = warned
        assert "never synchronised" in text
        assert f"rank {rank}" in text
        assert "a.weight" in text


def _legal_steps(rank: int, world: int) -> None:
    """Steps that must not be reported: the pool turns a warning into an error."""
    ddp = DistributedDataParallel(TwoLayers())
    other = TwoLayers()
    ours, others = (torch.optim.SGD(m.parameters(), lr=0.25) for m in (ddp, other))
    plain(other, rank, 0)
    with ddp.no_sync():
        plain(ddp, rank, 0)
        others.step()  # these parameters are not ours
    ddp.zero_grad()
    ours.step()  # nothing was left to step on
    with ddp.no_sync():
        plain(ddp, rank, 1)
    ddp.sync_gradients()
    ours.step()
    ours.step()  # once more on the same average
    ddp.zero_grad(set_to_none=False)
    plain(ddp, rank, 2)
    ours.step()


def test_legal_steps_are_not_reported(ranks: RankPool) -> None:
    ranks(_legal_steps)


def _a_then_b(model: nn.Module, rank: int, step: int) -> None:
    with unsynced(model):
        sq(model(batch(rank, step, which=0), "a")).backward()
    sq(model(batch(rank, step, which=1), "b")).backward()


@pytest.mark.parametrize("flags", [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": 1e-6}])
def test_a_parameter_used_only_without_synchronisation(ranks: RankPool, flags: dict[str, Any]) -> None:
    assert_equal_replicas(ranks(train_alike, Branches, _a_then_b, exact=True, **flags))


def _a_on_rank_0_then_b(model: nn.Module, rank: int, step: int) -> None:
    with unsynced(model):
        sq(model(batch(rank, step, which=0), "a" if rank == 0 else "b")).backward()
    sq(model(batch(rank, step, which=1), "b")).backward()


def test_a_parameter_used_only_without_synchronisation_on_one_rank(ranks: RankPool) -> None:
    for cap in (None, 1e-6):
        assert_equal_replicas(ranks(train_alike, Branches, _a_on_rank_0_then_b, exact=True, bucket_cap_mb=cap))


def _other_numbers_of_micro_steps(model: nn.Module, rank: int, step: int) -> None:
    with unsynced(model):
        for micro in range((rank + step) % 3):
            _micro_step(model, rank, step, micro)
    _micro_step(model, rank, step, 9)


def test_each_rank_accumulates_another_number_of_times(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, TwoLayers, _other_numbers_of_micro_steps, steps=4, exact=True))


def _on_demand(rank: int, world: int, arguments: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(TwoLayers(), **arguments)
    reference = OneProcess(TwoLayers(), world)
    for window in range(2):
        with ddp.no_sync():
            for micro in range(3):
                _micro_step(ddp, rank, window, micro)
        ddp.sync_gradients()
        reference.run(_three, window)
        assert_same_gradients(ddp.module, reference.module, f"window {window}", exact=True)
        ddp.sync_gradients()  # an average of averages is the same average
        assert_same_gradients(ddp.module, reference.module, f"window {window}, again", exact=True)
        ddp.zero_grad()
        reference.module.zero_grad()


def _three(model: nn.Module, rank: int, step: int) -> None:
    for micro in range(3):
        _micro_step(model, rank, step, micro)


@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb": 1e-6}])
def test_sync_gradients_averages_what_has_accumulated(ranks: RankPool, arguments: dict[str, Any]) -> None:
    ranks(_on_demand, arguments)


def _clipped(rank: int, world: int) -> float:
    ddp = DistributedDataParallel(TwoLayers())
    reference = OneProcess(TwoLayers(), world)
    reference.run(_two_micro_steps, 0)
    _two_micro_steps(ddp, rank, 0)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (ddp, reference.module)]
    assert_near(norms[0], norms[1], "norm")
    assert_same_gradients(ddp.module, reference.module, "clipped")
    return norms[0].item()


def _two_micro_steps(model: nn.Module, rank: int, step: int) -> None:
    with unsynced(model):
        _micro_step(model, rank, step, 0)
    _micro_step(model, rank, step, 1)


def test_the_gradient_norm_is_the_same_float_on_every_rank(ranks: RankPool) -> None:
    first, second = ranks(_clipped)
    assert first == second


def _carry(model: nn.Module, rank: int, step: int) -> None:
    """Several synchronised backwards without clearing: each adds its average to what is there."""
    for micro in range(3):
        _micro_step(model, rank, step, micro)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_synchronised_backwards_add_up(ranks: RankPool, set_to_none: bool) -> None:
    assert_equal_replicas(ranks(train_alike, TwoLayers, _carry, set_to_none=set_to_none))


def _set_from_outside(rank: int, world: int, switch: Callable[[Any], Any]) -> None:
    ddp = DistributedDataParallel(TwoLayers())
    assert ddp.require_backward_grad_sync is True
    with ddp.no_sync():
        assert ddp.require_backward_grad_sync is False
    assert ddp.require_backward_grad_sync is True
    ddp.require_backward_grad_sync = False
    with ddp.no_sync():
        pass
    assert ddp.require_backward_grad_sync is False


def test_no_sync_restores_what_was_set(ranks: RankPool) -> None:
    ranks(_set_from_outside, None)
