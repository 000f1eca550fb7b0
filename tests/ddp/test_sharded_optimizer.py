"""What a step may find: unused, frozen, new and odd parameters, late, accumulated and dropped gradients."""

from typing import Any

import pytest
import torch
from reference import (
    Branches,
    OneProcess,
    TwoLayers,
    assert_equal_replicas,
    assert_near,
    batch,
    digest,
    in_quarters,
    plain,
    raised,
    sq,
    unsynced,
)
from sharded_pair import ADAMW, MOMENTUM, Uneven, assert_alike, pair, train_alike, used_at_times
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from gradsync import DistributedDataParallel, ZeroRedundancyOptimizer, plain_optimizer_state
from rank_pool import RankPool


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW])
def test_unused_parameters_stay(ranks: RankPool, optimizer: Any) -> None:
    digests = ranks(train_alike, program=used_at_times, build=Branches, optimizer=optimizer, steps=6)
    assert_equal_replicas(digests)


class Kinds(nn.Module):
    """Parameters of several dtypes, a scalar, an empty one, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.single_ = nn.Linear(3, 50)
        self.double_ = nn.Linear(3, 50).double()
        self.half_ = nn.Parameter(torch.full((50,), 0.5, dtype=torch.bfloat16))
        self.complex_ = nn.Parameter(torch.full((50,), 1 + 2j))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.arange(150.0).view(3, 50).t() / 100)
        in_quarters(self.single_)
        in_quarters(self.double_)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.single_(x) * self.scalar + self.double_(x.double()).float() + x @ self.turned.t()
        return y * self.half_.float() + (y * self.complex_).imag + self.empty.sum()


def test_mixed_dtypes(ranks3: RankPool) -> None:
    assert_equal_replicas(ranks3(_mixed_dtypes))


def _mixed_dtypes(rank: int, world: int) -> str:
    ddp, sharded, reference = pair(world, Kinds, (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}))
    for step in range(6):
        plain(ddp, rank, step)
        reference.run(plain, step)
        for each in (sharded, reference.optimizer):
            each.step()
            each.zero_grad()
        for (name, p), q in zip(ddp.module.named_parameters(), reference.module.parameters(), strict=True):
            assert p.stride() == q.stride()
            rtol = 2e-2 if p.dtype == torch.bfloat16 else 1e-4
            assert_near(torch.view_as_real(p) if p.is_complex() else p, _real(q), f"step {step}: {name}", rtol=rtol)
    saved = sharded.state_dict()
    restored = torch.optim.AdamW(reference.module.parameters(), lr=0.01, eps=1e-3)
    restored.load_state_dict(plain_optimizer_state(saved, restored, reference.module))
    for name, p in reference.module.named_parameters():
        if not p.numel():
            continue
        want = reference.optimizer.state[p]
        assert restored.state[p]["exp_avg"].dtype == want["exp_avg"].dtype
        assert_near(_real(restored.state[p]["exp_avg"]), _real(want["exp_avg"]), name, rtol=2e-2)
    return digest(ddp.module)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _accumulating(model: nn.Module, rank: int, step: int) -> None:
    for which in range(2):
        with unsynced(model):
            sq(model(batch(rank, step, which=which))).backward()
    plain(model, rank, step)


def _several_backwards(model: nn.Module, rank: int, step: int) -> None:
    for which in range(3):
        sq(model(batch(rank, step, which=which))).backward()


def _both(model: nn.Module, rank: int, step: int) -> None:
    plain(model, rank, step)
    _accumulating(model, rank, step)


@pytest.mark.parametrize("program", [_accumulating, _several_backwards, _both])
def test_accumulation(ranks: RankPool, program: Any) -> None:
    assert_equal_replicas(ranks(train_alike, program=program, steps=5))


def _clear_by_optimizer(sharded: Any, _model: nn.Module, step: int) -> None:
    sharded.zero_grad(set_to_none=step % 2 == 0)


def _clear_by_module(_sharded: Any, model: nn.Module, step: int) -> None:
    model.zero_grad(set_to_none=step % 2 == 0)


def _clear_one(_sharded: Any, model: nn.Module, _step: int) -> None:
    next(iter(model.parameters())).grad = None


def _scale(_sharded: Any, model: nn.Module, _step: int) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
            p.grad /= 2


def _never(_sharded: Any, _model: nn.Module, _step: int) -> None:
    """Gradients of all steps add up."""


@pytest.mark.parametrize("clear", [_clear_by_optimizer, _clear_by_module, _clear_one, _scale, _never])
@pytest.mark.parametrize("program", [plain, used_at_times])
def test_ways_to_clear_gradients(ranks: RankPool, clear: Any, program: Any) -> None:
    assert_equal_replicas(ranks(_cleared, clear, program))


def _cleared(rank: int, world: int, clear: Any, program: Any) -> str:
    build = TwoLayers if program is plain else Branches
    ddp, sharded, reference = pair(world, build, MOMENTUM)
    for step in range(5):
        program(ddp, rank, step)
        reference.run(program, step)
        for each, module in ((sharded, ddp), (reference.optimizer, reference.module)):
            each.step()
            clear(each, module, step)
        assert_alike(ddp, reference, f"step {step}")
    return digest(ddp.module)


class Recomputed(nn.Module):
    """A layer that is gone through once more, under reentrant checkpoints, as often as forward is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Uneven()

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        again = [checkpoint(self.layer, x, use_reentrant=True) for _ in range(times)]
        return torch.stack([self.layer(x), *again]).sum(0)


def _more_often_later(model: nn.Module, rank: int, step: int) -> None:
    """From step 3 on gradients of rank 1 arrive more often than was learned."""
    sq(model(batch(rank, step).requires_grad_(), 2 if rank == 1 and step >= 3 else 0)).backward()


def test_a_program_that_fires_more_often_than_learned(ranks: RankPool) -> None:
    how = {"build": Recomputed, "optimizer": MOMENTUM, "steps": 6}
    assert_equal_replicas(ranks(train_alike, program=_more_often_later, **how))


def test_frozen_and_unfrozen_parameters(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_freezing))


def _freezing(rank: int, world: int) -> str:
    ddp, sharded, reference = pair(world, Uneven)
    for step in range(9):
        for model in (ddp.module, reference.module):
            model.first.requires_grad_(step not in (2, 3))
            model.middle.weight.requires_grad_(step not in (0, 3, 4, 5))
        plain(ddp, rank, step)
        reference.run(plain, step)
        for each in (sharded, reference.optimizer):
            each.step()
            each.zero_grad()
        assert_alike(ddp, reference, f"step {step}")
    assert set(sharded.state_dict()["state"]) == {name for name, _ in ddp.module.named_parameters()}
    return digest(ddp.module)


def test_parameters_added_later(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_growing))


def _growing(rank: int, world: int) -> str:
    ddp, sharded, reference = pair(world, Branches)
    for step in range(6):
        if step == 2:
            for model, optimizer in ((ddp.module, sharded), (reference.module, reference.optimizer)):
                model.d = in_quarters(nn.Linear(3, 2))
                model.names = "abcd"
                optimizer.add_param_group({"params": list(model.d.parameters()), "lr": 0.1})
        plain(ddp, rank, step)
        reference.run(plain, step)
        for each in (sharded, reference.optimizer):
            each.step()
            each.zero_grad()
        assert_alike(ddp, reference, f"step {step}")
    return digest(ddp.module)


def test_parameters_in_no_group(ranks: RankPool) -> None:
    for text in ranks(_forgotten):
        assert "d.weight, d.bias (2 parameter(s)) are trained by DistributedDataParallel but are in no" in text


def _forgotten(rank: int, world: int) -> str:
    ddp, sharded, _ = pair(world, Branches)
    plain(ddp, rank, 0)
    sharded.step()
    ddp.module.d = in_quarters(nn.Linear(3, 2))
    ddp.module.names = "abcd"
    return raised(lambda: plain(ddp, rank, 1))


def test_an_optimizer_that_comes_after_some_passes(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_late_start))


def _late_start(rank: int, world: int) -> str:
    ddp, reference = DistributedDataParallel(Uneven()), OneProcess(Uneven(), world)
    for step in range(2):
        plain(ddp, rank, step)
        reference.run(plain, step)
    sharded = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1)
    reference.optimizer = torch.optim.SGD(reference.module.parameters(), lr=0.1)
    for step in range(2, 5):
        for each in (sharded, reference.optimizer):  # the first time on the gradients of the passes before
            each.step()
        assert_alike(ddp, reference, f"step {step}")
        plain(ddp, rank, step)
        reference.run(plain, step)
    return digest(ddp.module)


def test_a_closure(ranks: RankPool) -> None:
    assert all(ranks(_closure))


def _closure(rank: int, world: int) -> bool:
    ddp, sharded, reference = pair(world)

    def closure() -> torch.Tensor:
        sharded.zero_grad()
        loss = sq(ddp(batch(rank, 0)))
        loss.backward()
        return loss

    loss = sharded.step(closure)
    reference.train(plain, 0)
    assert_alike(ddp, reference, "after the step")
    return bool(loss > 0)


def test_gradients_that_were_never_synchronised_are_reported(ranks: RankPool) -> None:
    for _, notes in ranks.run_with_warnings(_unsynchronised):
        assert "UnsynchronizedGradientsWarning" in notes[0]


def _unsynchronised(rank: int, world: int) -> None:
    ddp, sharded, _ = pair(world)
    with ddp.no_sync():
        plain(ddp, rank, 0)
    sharded.step()


def test_parameters_that_were_given_other_memory(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_moved))


def _moved(rank: int, world: int) -> str:
    ddp, sharded, reference = pair(world, Uneven)
    for step in range(3):
        plain(ddp, rank, step)
        reference.run(plain, step)
        for p in [*ddp.parameters(), *reference.module.parameters()]:
            p.data = p.data * 2
        for each in (sharded, reference.optimizer):
            each.step()
            each.zero_grad()
        assert_alike(ddp, reference, f"step {step}")
    return digest(ddp.module)


def test_a_graph_from_before_the_step_is_refused(ranks: RankPool) -> None:
    for text in ranks(_stale_graph):
        assert "modified by an inplace operation" in text


def _stale_graph(rank: int, world: int) -> str:
    ddp, sharded, _ = pair(world)
    loss = sq(ddp(batch(rank, 0)))
    loss.backward(retain_graph=True)
    sharded.step()
    return raised(loss.backward)


def test_every_run_gives_the_same_bits(ranks3: RankPool) -> None:
    first, second = (ranks3(train_alike, build=Uneven, steps=3)[0] for _ in range(2))
    assert first == second


def test_state_and_gradients_are_divided(ranks3: RankPool) -> None:
    counts = ranks3(_count)
    total = sum(p.numel() for p in Uneven().parameters())
    assert sum(state for state, _ in counts) == total
    assert all(abs(state - total / 3) < 200 for state, _ in counts)
    assert all(kept == 0 for _, kept in counts)


def _count(rank: int, world: int) -> tuple[int, int]:
    ddp, sharded, _ = pair(world, Uneven)
    plain(ddp, rank, 0)
    sharded.step()
    sharded.zero_grad()
    state = sum(values["exp_avg"].numel() for values in sharded._inner.state.values())
    kept = sum(bucket.shard.numel() for bucket in ddp.reducer.buckets if bucket.shard is not None)
    return state, kept


@pytest.mark.parametrize("joins", ["ddp", "both"])
def test_uneven_numbers_of_batches(ranks3: RankPool, joins: str) -> None:
    assert_equal_replicas(ranks3(_uneven, joins))


def _uneven(rank: int, world: int, joins: str) -> str:
    ddp, sharded, reference = pair(world)

    def program(model: nn.Module, rank: int, step: int) -> None:
        if step < 2 + rank:
            plain(model, rank, step)

    with ddp.join() if joins == "ddp" else Join([ddp, sharded]):
        for step in range(2 + rank):
            plain(ddp, rank, step)
            sharded.step()
            sharded.zero_grad()
    for step in range(1 + world):
        reference.train(program, step)
    assert_alike(ddp, reference, "in the end")
    plain(ddp, rank, 9)  # and on without join
    sharded.step()
    reference.train(plain, 9)
    assert_alike(ddp, reference, "after join")
    return digest(ddp.module)
