"""Gradients that are spread over the ranks: what they say, clipping by the global norm, whole ones on request."""

import pytest
import torch
from reference import Branches, assert_near, batch, plain, raised, unsynced
from sharded_pair import Uneven, pair, used_at_times
from torch import nn

from gradsync.ddp.sharded_gradient import ShardedGradient
from rank_pool import RankPool


def test_a_sharded_gradient_says_what_it_is(ranks: RankPool) -> None:
    for texts in ranks(_look_at_gradients):
        clipped, normed, added, shown = texts
        for text in (clipped, normed, added):
            assert text.startswith("ShardedGradientError: rank ")
            assert "optimizer.clip_grad_norm_()" in text
        assert "'a.weight'" in normed
        assert shown == "ShardedGradient('a.weight', shape=(3, 3))"


def _look_at_gradients(rank: int, world: int) -> list[str]:
    ddp, _, _ = pair(world)
    plain(ddp, rank, 0)
    grad = ddp.module.a.weight.grad
    assert (grad.shape, grad.dtype, grad.device.type) == ((3, 3), torch.float32, "cpu")
    return [
        raised(lambda: nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)),
        raised(lambda: grad.norm()),
        raised(lambda: grad + 1),
        repr(grad),
    ]


def test_a_plain_optimizer_cannot_step_on_slices(ranks: RankPool) -> None:
    for text in ranks(_plain_step):
        assert "ShardedGradientError" in text


def _plain_step(rank: int, world: int) -> str:
    ddp, _, _ = pair(world)
    plain(ddp, rank, 0)
    return raised(torch.optim.SGD(ddp.parameters(), lr=0.1).step)


def test_whole_gradients_on_request(ranks: RankPool) -> None:
    ranks(_whole_gradients)


def _whole_gradients(rank: int, world: int) -> None:
    ddp, sharded, reference = pair(world, Branches)
    for step in range(3):
        used_at_times(ddp, rank, step)
        reference.run(used_at_times, step)
        for (name, p), q in zip(ddp.module.named_parameters(), reference.module.parameters(), strict=True):
            whole = sharded.full_gradient(p)
            assert (whole is None) == (q.grad is None), name
            if whole is not None:
                assert type(p.grad) is ShardedGradient
                assert_near(whole, q.grad, name)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_norms_of_any_order(ranks: RankPool, order: float) -> None:
    ranks(_norms, order)


def _norms(rank: int, world: int, order: float) -> None:
    ddp, sharded, reference = pair(world, Uneven)
    assert sharded.clip_grad_norm_(1.0, order) == 0
    plain(ddp, rank, 0)
    reference.run(plain, 0)
    before = sharded.clip_grad_norm_(float("inf"), order)
    assert_near(before, nn.utils.clip_grad_norm_(reference.module.parameters(), 0.01, order), "norm", rtol=1e-4)
    sharded.clip_grad_norm_(0.01, order)
    for p, q in zip(ddp.parameters(), reference.module.parameters(), strict=True):
        assert_near(sharded.full_gradient(p), q.grad, "clipped", rtol=1e-4)


@pytest.mark.parametrize("look", ["clip", "whole"])
def test_looking_at_gradients_takes_nothing_from_the_next_pass(ranks: RankPool, look: str) -> None:
    ranks(_look_in_between, look)


def _look_in_between(rank: int, world: int, look: str) -> None:
    ddp, sharded, reference = pair(world, Uneven)
    plain(ddp, rank, 0)
    with unsynced(ddp):
        plain(ddp, rank, 1)
    if look == "clip":
        sharded.clip_grad_norm_(float("inf"))
    else:
        for p in ddp.parameters():
            sharded.full_gradient(p)
    plain(ddp, rank, 2)
    for step in range(3):
        reference.run(plain, step)
    for (name, p), q in zip(ddp.module.named_parameters(), reference.module.parameters(), strict=True):
        assert_near(sharded.full_gradient(p), q.grad, name)


def test_clipping_scales_what_was_added_since_the_last_pass(ranks: RankPool) -> None:
    ranks(_clip_what_was_added)


def _clip_what_was_added(rank: int, world: int) -> None:
    ddp, sharded, _ = pair(world, Uneven)
    plain(ddp, rank, 0)
    with unsynced(ddp):
        plain(ddp, rank, 1)
    grad = ddp.module.middle.weight.grad
    piece, added = grad.own_piece(), grad.local.clone()
    norm = sharded.clip_grad_norm_(1e-3)
    assert_near(grad.own_piece(), piece * (1e-3 / norm), "slice", rtol=1e-4)
    assert_near(grad.local, added * (1e-3 / norm), "added", rtol=1e-4)


def test_a_norm_that_is_not_finite_raises_everywhere(ranks: RankPool) -> None:
    for text in ranks(_infinite):
        assert "is inf, so they cannot be clipped" in text


def _infinite(rank: int, world: int) -> str:
    ddp, sharded, _ = pair(world)
    (ddp(batch(rank, 0)).sum() * (float("inf") if rank else 1.0)).backward()
    return raised(lambda: sharded.clip_grad_norm_(1.0, float("inf"), error_if_nonfinite=True)).replace("nan", "inf")


def test_a_slice_gets_the_same_memory_again_unless_somebody_keeps_a_gradient_in_it(ranks: RankPool) -> None:
    ranks(_memory_of_slices)


def _memory_of_slices(rank: int, world: int) -> None:
    ddp, _, _ = pair(world, Uneven)
    piece = _own_piece_after_a_step(ddp, rank, 0)
    address, before = piece.data_ptr(), piece.clone()
    held = _own_piece_after_a_step(ddp, rank, 1)  # while `piece` is held
    assert held.data_ptr() != address
    assert torch.equal(piece, before)
    address = held.data_ptr()
    del held, piece
    assert _own_piece_after_a_step(ddp, rank, 2).data_ptr() == address


def _own_piece_after_a_step(ddp: nn.Module, rank: int, step: int) -> torch.Tensor:
    ddp.zero_grad()
    plain(ddp, rank, step)
    return ddp.module.middle.weight.grad.own_piece()
