"""Buffers: whose values count, when they are sent, and that nothing saved for a backward is changed."""

from typing import Any

import pytest
import torch
from reference import (
    OneProcess,
    assert_equal_replicas,
    assert_near,
    assert_same_gradients,
    batch,
    digest,
    in_quarters,
    is_wrapped,
    sgd,
    sq,
    train_alike,
    unwrapped,
    whole_numbers,
)
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankPool


class _Reassigning(nn.Module):
    """Replaces its buffer by a new tensor, made of local data, and then uses it in the graph."""

    buf: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.register_buffer("buf", torch.ones(2))
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.buf = self.buf + x.mean()
        return self.a(x) * self.buf


def _two_forwards(model: nn.Module, rank: int, step: int) -> None:
    first = model(batch(rank, step, which=0))
    if not is_wrapped(model):  # the second forward of every rank starts from what rank 0's first one left
        model.buf = _buffer_before(step) + batch(0, step, which=0).mean()
    second = model(batch(rank, step, which=1))
    (sq(first) + sq(second)).backward()


def _buffer_before(step: int) -> torch.Tensor:
    seen = [batch(0, earlier, which=which).mean() for earlier in range(step) for which in (0, 1)]
    return torch.ones(2) + sum(seen)


def test_synchronisation_never_changes_a_tensor_saved_for_backward(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, _Reassigning, _two_forwards))


def _one_forward(model: nn.Module, rank: int, step: int) -> None:
    sq(model(batch(rank, step))).backward()
    if is_wrapped(model):
        inner: Any = unwrapped(model)
        earlier = sum(batch(0, seen).mean() for seen in range(step))
        assert_near(inner.buf, torch.ones(2) + earlier + batch(rank, step).mean(), "buffer")


def test_a_reassigned_buffer_is_still_synchronised(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, _Reassigning, _one_forward))


class _Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(x))


def _real_and_fake(model: nn.Module, rank: int, step: int) -> None:
    targets = whole_numbers(2, 4, 2, key=(rank, step, 5))
    real = model(batch(rank, step, rows=4, which=0))
    fake = model(batch(rank, step, rows=4, which=1))
    ((real - targets[0]).square().sum() / 4 + (fake - targets[1]).square().sum() / 8).backward()


def test_batch_norm_run_twice_before_one_backward(ranks: RankPool) -> None:
    # what a second forward in a window starts from is no matter for gradients, so buffers are left out here
    assert_equal_replicas(ranks(train_alike, _Normalised, _real_and_fake, checks_buffers=False))


def _penalties(model: nn.Module, rank: int, step: int) -> None:
    """Between the forwards torch.autograd.grad runs through a graph that the backward still needs."""
    total = torch.zeros(())
    for which in range(2):
        x = batch(rank, step, rows=4, which=which).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        total = total + sq(output - 1) + slope.square().sum() / 64
    total.backward()


def _graph_kept(model: nn.Module, rank: int, step: int) -> None:
    """Between the forwards a backward runs that keeps its graph."""
    first = model(batch(rank, step, rows=4, which=0))
    sq(first - 1).backward(retain_graph=True)
    second = model(batch(rank, step, rows=4, which=1))
    (sq(first - 2) + sq(second - 1)).backward()


def _overlapping_graphs(model: nn.Module, rank: int, step: int) -> None:
    """One of two graphs is used up before the third forward, the other one after it."""
    first, second = (model(batch(rank, step, rows=4, which=which)) for which in range(2))
    sq(first - 1).backward()
    third = model(batch(rank, step, rows=4, which=2))
    (sq(second - 1) + sq(third - 1)).backward()


@pytest.mark.parametrize("program", [_penalties, _graph_kept, _overlapping_graphs])
def test_batch_norm_in_graphs_that_outlive_a_backward(ranks: RankPool, program: Any) -> None:
    assert_equal_replicas(ranks(train_alike, _Normalised, program, lr=1 / 64, checks_buffers=False))


class _AllKinds(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.register_buffer("int64", torch.tensor([2**40 + rank, rank]))
        self.register_buffer("bools", torch.tensor([rank == 0, True, rank == 1]))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("floats", torch.full((2,), float(rank)))
        self.register_buffer("scalar", torch.tensor(rank + 5))
        self.register_buffer("none", None)
        self.register_buffer("passing", torch.full((2,), rank + 0.5), persistent=False)
        self.register_buffer("brief", torch.full((3,), rank + 0.5, dtype=torch.bfloat16))
        self.register_buffer("complicated", torch.full((2,), complex(rank, 1)))
        self.register_buffer("transposed", torch.arange(6.0).reshape(2, 3).t() + rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


def _kinds(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(_AllKinds(rank))
    mine, wanted = dict(ddp.module.named_buffers()), dict(_AllKinds(0).named_buffers())
    assert list(mine) == list(wanted)
    for name, buffer in mine.items():
        assert buffer.dtype == wanted[name].dtype, name
        assert buffer.stride() == wanted[name].stride(), name
        assert torch.equal(buffer, wanted[name]), name
    assert ddp.module.none is None
    for step in range(3):
        with torch.no_grad():
            ddp.module.int64 += rank
            ddp.module.bools ^= rank == 1
        sq(ddp(batch(rank, step))).backward()
        assert torch.equal(ddp.module.int64, torch.tensor([2**40, 0]))
        assert torch.equal(ddp.module.bools, torch.tensor([True, True, False]))


def test_buffers_of_every_kind_follow_rank_0(ranks: RankPool) -> None:
    ranks(_kinds)


class _WithBuffer(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.register_buffer("buf", torch.full((2,), float(value)))
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


def _unsent(rank: int, world: int, arguments: dict[str, bool]) -> list[list[float]]:
    ddp = DistributedDataParallel(_WithBuffer(rank), **arguments)
    seen = [ddp.module.buf.tolist()]
    sq(ddp(batch(rank, 0))).backward()
    ddp.module.buf += rank + 1
    sq(ddp(batch(rank, 1))).backward()
    return [*seen, ddp.module.buf.tolist()]


@pytest.mark.parametrize("arguments", [{"broadcast_buffers": False}, {"forward_sync_buffers": False}])
def test_without_sending_in_forward_buffers_start_equal_and_stay_local(
    ranks: RankPool, arguments: dict[str, bool]
) -> None:
    replies = ranks.run_with_warnings(_unsent, arguments)
    assert [seen for seen, _ in replies] == [[[0, 0], [1, 1]], [[0, 0], [2, 2]]]
    if "broadcast_buffers" in arguments:
        assert all("FutureWarning" in warned[0] for _, warned in replies)


def _on_demand(rank: int, world: int) -> list[list[float]]:
    ddp = DistributedDataParallel(_WithBuffer(0))
    seen = []
    for mode in ("mean", "broadcast"):
        ddp.module.buf.fill_(rank)
        ddp.sync_buffers(mode)
        seen.append(ddp.module.buf.tolist())
    ddp.module.buf.fill_(rank)
    ddp.sync_buffers()
    return [*seen, ddp.module.buf.tolist()]


def test_sync_buffers_on_demand(ranks: RankPool) -> None:
    assert ranks(_on_demand) == [[[0.5, 0.5], [0, 0], [0, 0]]] * 2


def _mean_of_integers(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(_AllKinds(rank))
    ddp.module.int64 += rank
    ddp.module.complicated += rank
    ddp.sync_buffers("mean")
    assert torch.equal(ddp.module.int64, torch.tensor([2**40, 0]))
    assert torch.equal(ddp.module.complicated, torch.full((2,), complex(0.5, 1)))


def test_the_mean_of_buffers_leaves_integers_to_rank_0(ranks: RankPool) -> None:
    ranks(_mean_of_integers)


def _eval_does_not_send(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(_WithBuffer(0))
    ddp.module.buf.fill_(rank + 1)
    ddp.eval()
    ddp(batch(rank, 0))
    with torch.no_grad():
        ddp.train()
        ddp(batch(rank, 0))
    assert ddp.module.buf.tolist() == [rank + 1] * 2


def test_neither_eval_nor_no_grad_sends_buffers(ranks: RankPool) -> None:
    ranks(_eval_does_not_send)


# ----------------------------------------------------------------- synchronised batch norm on CPU


def _rows_of(rank: int, step: int, sizes: tuple[int, ...]) -> torch.Tensor:
    return whole_numbers(sum(sizes), 3, key=(step, 8)).split(sizes)[rank]


def _targets_of(rank: int, step: int, sizes: tuple[int, ...]) -> torch.Tensor:
    return whole_numbers(sum(sizes), 2, key=(step, 9)).split(sizes)[rank]


def _sync_batch_norm(rank: int, world: int, sizes: tuple[int, ...]) -> str:
    """Outputs, statistics and gradients are those of ordinary batch norm on all samples in one process."""
    whole, wrapped = _Normalised(), nn.SyncBatchNorm.convert_sync_batchnorm(_Normalised())
    ddp = DistributedDataParallel(wrapped)
    optimizers = [sgd(0.25)(m.parameters()) for m in (whole, ddp)]
    for step in range(3):
        everything = torch.cat([_rows_of(r, step, sizes) for r in range(world)])
        targets = torch.cat([_targets_of(r, step, sizes) for r in range(world)])
        expected = whole(everything)
        ((expected - targets).square().sum() / 4 / world).backward()
        output = ddp(_rows_of(rank, step, sizes))
        ((output - _targets_of(rank, step, sizes)).square().sum() / 4).backward()
        assert_near(output, expected.split(sizes)[rank], f"step {step}: output")
        assert_same_gradients(ddp.module, whole, f"step {step}")
        for name, buffer in ddp.module.named_buffers():
            assert_near(buffer, dict(whole.named_buffers())[name], f"step {step}: {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return digest(ddp.module)


@pytest.mark.parametrize("sizes", [(4, 4), (3, 5), (7, 1), (6, 0), (0, 6)])
def test_synchronised_batch_norm_on_cpu(ranks: RankPool, sizes: tuple[int, int]) -> None:
    assert_equal_replicas(ranks(_sync_batch_norm, sizes))


def test_synchronised_batch_norm_on_three_ranks(ranks3: RankPool) -> None:
    assert_equal_replicas(ranks3(_sync_batch_norm, (2, 0, 5)))


def _sync_batch_norm_in_eval(rank: int, world: int) -> None:
    """In eval mode each rank is on its own, also when only one of them evaluates."""
    ddp = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(_Normalised()))
    reference = OneProcess(_Normalised(), world)
    ddp.eval()
    reference.module.eval()
    if rank == 0:
        assert_near(ddp(batch(0, 0)), reference.module(batch(0, 0)), "output")


def test_synchronised_batch_norm_evaluates_alone(ranks: RankPool) -> None:
    ranks(_sync_batch_norm_in_eval)
