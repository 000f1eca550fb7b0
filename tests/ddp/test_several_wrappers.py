"""Several wrapped models in one program: one backward through all of them, branches that differ per rank."""

import contextlib
from typing import Any

import pytest
import torch
from reference import Branches, assert_equal_replicas, batch, digest, in_quarters, is_wrapped, sgd, sq, unsynced
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankPool


class _Square(Branches):
    """Layers 3-3 side by side."""

    def __init__(self, seed: int) -> None:
        nn.Module.__init__(self)
        self.names = "abc"
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        in_quarters(self, seed)


def _chain(models: list[Any], rank: int, step: int) -> None:
    """In each step each rank uses other layers of the two models."""
    use = ["a", "bc", "abc", "b"]
    hidden = torch.tanh(models[0](batch(rank, step), use[(step + rank) % 4]))
    sq(models[1](hidden, use[(step + 2 * rank + 1) % 4])).backward()


def _chain_in_another_order(models: list[Any], rank: int, step: int) -> None:
    """Which model comes first, and so which one backward reaches first, differs per rank."""
    _chain(models if (rank + step) % 2 == 0 else models[::-1], rank, step)


def _side_by_side(models: list[Any], rank: int, step: int) -> None:
    """One loss of both; on rank 1 the second model takes no part in every other step."""
    loss = sq(models[0](batch(rank, step), "abc"[: 1 + rank + step % 2]))
    if rank == 0 or step % 2 == 0:
        loss = loss + sq(models[1](batch(rank, step, which=1), "ac"))
        loss.backward()
    else:
        # the second model must take part in its pass all the same
        (loss + models[1](batch(rank, step, which=1)).sum() * 0).backward()


def _one_accumulates(models: list[Any], rank: int, step: int) -> None:
    """The first model synchronises in every backward, the second in the last one only."""
    for micro in range(3):
        with unsynced(models[1]) if micro < 2 else contextlib.nullcontext():
            hidden = torch.tanh(models[0](batch(rank, step, which=micro), "ab"))
            sq(models[1](hidden, "bc")).backward()


def _trained(rank: int, world: int, program: Any, cap: float | None) -> str:
    wrapped = [DistributedDataParallel(_Square(seed), bucket_cap_mb=cap) for seed in range(2)]
    bare = [_Square(seed) for seed in range(2)]
    optimizers = [sgd(1 / 64)(m.parameters()) for m in (*wrapped, *bare)]
    for step in range(8):
        program(wrapped, rank, step)
        _average(bare, world, program, step)
        for number, (ddp, module) in enumerate(zip(wrapped, bare, strict=True)):
            for (name, p), q in zip(ddp.module.named_parameters(), module.parameters(), strict=True):
                what = f"step {step}, model {number}, {name}"
                assert (p.grad is None) == (q.grad is None), f"{what}: {p.grad} and {q.grad}"
                if p.grad is not None:
                    torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6, msg=lambda t, w=what: f"{w}: {t}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return digest(wrapped[0]) + digest(wrapped[1])


def _average(bare: list[_Square], world: int, program: Any, step: int) -> None:
    """Leave the rank averages on the bare models; the program keeps to two models whoever they are."""
    parameters = [p for module in bare for p in module.parameters()]
    totals: list[torch.Tensor | None] = [None] * len(parameters)
    for rank in range(world):
        assert not any(is_wrapped(m) for m in bare)
        for module in bare:
            module.zero_grad()
        program(bare, rank, step)
        for number, p in enumerate(parameters):
            if p.grad is not None:
                before = totals[number]
                totals[number] = p.grad.clone() if before is None else before + p.grad
    for p, total in zip(parameters, totals, strict=True):
        p.grad = None if total is None else total / world


@pytest.mark.parametrize("cap", [None, 1e-6])
@pytest.mark.parametrize("program", [_chain, _chain_in_another_order, _side_by_side, _one_accumulates])
def test_two_wrapped_models_in_one_backward(ranks: RankPool, program: Any, cap: float | None) -> None:
    assert_equal_replicas(ranks(_trained, program, cap))


@pytest.mark.parametrize("program", [_chain, _chain_in_another_order, _one_accumulates])
def test_two_wrapped_models_in_one_backward_on_three_ranks(ranks3: RankPool, program: Any) -> None:
    assert_equal_replicas(ranks3(_trained, program, 1e-6))


def _shared_layer(rank: int, world: int) -> None:
    """Two wrappers around modules that share a layer: each reduces it in its own passes."""
    shared = in_quarters(nn.Linear(3, 3))
    first, second = (DistributedDataParallel(nn.Sequential(shared, in_quarters(nn.Linear(3, 2), s))) for s in (1, 2))
    expected = []
    for ddp in (first, second):
        grads = []
        for r in range(world):
            grads.append(torch.autograd.grad(sq(ddp.module(batch(r, 0))), shared.weight)[0])
        expected.append(sum(grads) / world)
        sq(ddp(batch(rank, 0))).backward()
        torch.testing.assert_close(shared.weight.grad, expected[-1], rtol=1e-5, atol=1e-6)
        shared.zero_grad()


def test_two_wrappers_that_share_a_layer(ranks: RankPool) -> None:
    ranks(_shared_layer)
