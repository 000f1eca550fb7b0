"""Parameters that a pass uses more than once: checkpoints, tied weights, several backwards, higher orders."""

from typing import Any

import pytest
import torch
from reference import (
    OneProcess,
    TwoHeads,
    TwoLayers,
    assert_equal_replicas,
    assert_near,
    assert_same_gradients,
    batch,
    in_quarters,
    is_wrapped,
    sq,
    train_alike,
    unwrapped,
    whole_numbers,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradsync import DistributedDataParallel
from rank_pool import RankPool

_FLAGS: list[dict[str, bool]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


class _Checkpointed(nn.Module):
    """A block that is run ``times`` times under a checkpoint, and a head outside of it."""

    def __init__(self, times: int, use_reentrant: bool) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.times, self.use_reentrant = times, use_reentrant
        in_quarters(self)

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.two(torch.tanh(self.one(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = checkpoint(self._block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def _reentrant_once() -> nn.Module:
    return _Checkpointed(1, True)


def _reentrant_twice() -> nn.Module:
    return _Checkpointed(2, True)


def _plain_once() -> nn.Module:
    return _Checkpointed(1, False)


def _plain_twice() -> nn.Module:
    return _Checkpointed(2, False)


def _with_input_grad(model: nn.Module, rank: int, step: int) -> None:
    sq(model(batch(rank, step).requires_grad_())).backward()


@pytest.mark.parametrize("flags", _FLAGS)
@pytest.mark.parametrize("build", [_reentrant_once, _reentrant_twice, _plain_once, _plain_twice])
def test_checkpoints(ranks: RankPool, build: Any, flags: dict[str, bool]) -> None:
    assert_equal_replicas(ranks(train_alike, build, _with_input_grad, exact=True, **flags))


@pytest.mark.parametrize("build", [_reentrant_twice, _plain_twice])
def test_checkpoints_with_a_bucket_a_parameter(ranks: RankPool, build: Any) -> None:
    assert_equal_replicas(ranks(train_alike, build, _with_input_grad, steps=5, bucket_cap_mb=1e-6))


class _OnlyCheckpoints(nn.Module):
    """The output of the wrapper is that of a reentrant checkpoint: its backward is the first thing to run."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.a, x, use_reentrant=True)
        return checkpoint(lambda y: checkpoint(self.b, y, use_reentrant=True), x, use_reentrant=True)


def test_nested_reentrant_checkpoints(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, _OnlyCheckpoints, _with_input_grad, exact=True))


def _forwards_in_vain(model: nn.Module, rank: int, step: int) -> None:
    model(batch(rank, step, which=1))
    sq(model(batch(rank, step))).backward()
    with torch.no_grad():
        model(batch(rank, step, which=2))


@pytest.mark.parametrize("flags", _FLAGS)
def test_forwards_without_a_backward_do_not_count(ranks: RankPool, flags: dict[str, bool]) -> None:
    assert_equal_replicas(ranks(train_alike, TwoLayers, _forwards_in_vain, exact=True, **flags))


def _two_losses(model: nn.Module, rank: int, step: int) -> None:
    first, second = model(batch(rank, step))
    sq(first).backward(retain_graph=True)
    sq(second).backward()


def _twice_through_one_graph(model: nn.Module, rank: int, step: int) -> None:
    loss = sq(model(batch(rank, step))[0])
    loss.backward(retain_graph=True)
    loss.backward()


# The second backward adds to an average, and the sum is averaged again: (s + x0)/2 + (s + x1)/2 rounds where
# s + (x0 + x1)/2 does not.
@pytest.mark.parametrize("cap", [None, 1e-6])
@pytest.mark.parametrize("program", [_two_losses, _twice_through_one_graph])
def test_two_backwards_through_a_shared_trunk(ranks: RankPool, program: Any, cap: float | None) -> None:
    assert_equal_replicas(ranks(train_alike, TwoHeads, program, bucket_cap_mb=cap))


class _Tied(nn.Module):
    """The output layer has the input embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.body, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.wte.weight
        in_quarters(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.wte(tokens))))


def _on_tokens(model: nn.Module, rank: int, step: int) -> None:
    if is_wrapped(model):
        inner: Any = unwrapped(model)
        assert inner.head.weight is inner.wte.weight
        assert len(list(model.parameters())) == 3
    sq(model(whole_numbers(4, key=(rank, step)).abs().long())).backward()


@pytest.mark.parametrize("as_views", [False, True])
def test_a_tied_matrix_is_reduced_once_when_complete(ranks: RankPool, as_views: bool) -> None:
    arguments = {"bucket_cap_mb": 1e-5, "gradient_as_bucket_view": as_views}
    assert_equal_replicas(ranks(train_alike, _Tied, _on_tokens, steps=4, exact=True, **arguments))


def _gradient_penalty(model: nn.Module, rank: int, step: int) -> None:
    x = batch(rank, step).requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    penalty = (slope.square().sum(1) - 1).square().mean()
    (penalty + sq(output)).backward()


@pytest.mark.parametrize("cap", [None, 1e-6])
def test_a_gradient_penalty(ranks: RankPool, cap: float | None) -> None:
    assert_equal_replicas(ranks(train_alike, TwoLayers, _gradient_penalty, exact=True, bucket_cap_mb=cap))


def _asks_for_gradients(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(TwoLayers())
    reference = OneProcess(TwoLayers(), world)
    for step in range(2):
        parameters = list(ddp.parameters())
        local = torch.autograd.grad(sq(ddp(batch(rank, step, which=1))), parameters)
        replica = TwoLayers()
        expected = torch.autograd.grad(sq(replica(batch(rank, step, which=1))), list(replica.parameters()))
        for got, want in zip(local, expected, strict=True):
            assert_near(got, want, "local gradient", exact=True)
        assert all(p.grad is None for p in parameters)
        sq(ddp(batch(rank, step))).backward()
        reference.run(lambda model, r, s: sq(model(batch(r, s))).backward(), step)
        assert_same_gradients(ddp.module, reference.module, exact=True)
        ddp.zero_grad()
        reference.module.zero_grad()


def test_autograd_grad_is_local_and_disturbs_nothing(ranks: RankPool) -> None:
    ranks(_asks_for_gradients)


def _create_graph(model: nn.Module, rank: int, step: int) -> None:
    """The gradients have a graph themselves, which torch warns of."""
    sq(model(batch(rank, step))).backward(create_graph=True)


def test_backward_with_create_graph(ranks: RankPool) -> None:
    replies = ranks.run_with_warnings(train_alike, TwoLayers, _create_graph, exact=True)
    assert_equal_replicas([digest for digest, _ in replies])


def _backward_into_inputs_only(rank: int, world: int) -> None:
    """backward(inputs=...) on something that is no parameter leaves the engine alone."""
    ddp = DistributedDataParallel(TwoLayers())
    x = batch(rank, 0).requires_grad_()
    sq(ddp(x)).backward(inputs=[x])
    assert x.grad is not None
    assert all(p.grad is None for p in ddp.parameters())
    ddp.sync_gradients()
    assert all(p.grad is None for p in ddp.parameters())


def test_backward_into_the_input_only(ranks: RankPool) -> None:
    ranks(_backward_into_inputs_only)
