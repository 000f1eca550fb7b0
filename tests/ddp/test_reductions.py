"""Sums in place of means, and means over all tokens: unequal counts, accumulation, gradients carried over.

Gradients that are synchronised already are never added up over the ranks a second time.
"""

import contextlib
from typing import Any

import pytest
import torch
from reference import (
    Branches,
    OneProcess,
    Program,
    TwoLayers,
    assert_equal_replicas,
    assert_same_gradients,
    assert_same_state,
    batch,
    digest,
    is_wrapped,
    raised,
    sgd,
    sq,
    unsynced,
)
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankPool


def _rows(rank: int, step: int, micro: int) -> int:
    """How many rows a rank has; not the same everywhere, and sometimes none."""
    return (3 * rank + 2 * step + micro) % 4


def _weighted_micro_step(model: nn.Module, rank: int, step: int, micro: int, use: str = "") -> None:
    rows = _rows(rank, step, micro)
    if is_wrapped(model) and model.counts_weights:  # type: ignore[union-attr]
        model.add_gradient_weight(rows)  # type: ignore[operator,union-attr]
    x = batch(rank, step, rows, which=micro)
    sq(model(x, use) if use else model(x)).backward()


def _one(model: nn.Module, rank: int, step: int) -> None:
    _weighted_micro_step(model, rank, step, 0)


def _three(model: nn.Module, rank: int, step: int) -> None:
    for micro in range(3):
        with unsynced(model) if micro < 2 else contextlib.nullcontext():
            _weighted_micro_step(model, rank, step, micro)


def _three_branches(model: nn.Module, rank: int, step: int) -> None:
    """Layer c is used in unsynchronised micro-steps only, b on one rank only."""
    for micro, use in enumerate(("ac", "ab" if rank == 0 else "a", "a")):
        with unsynced(model) if micro < 2 else contextlib.nullcontext():
            _weighted_micro_step(model, rank, step, micro, use)


_NUM_MICRO = {_one: 1, _three: 3, _three_branches: 3}


def _total_rows(world: int, step: int, program: Program) -> int:
    return sum(_rows(rank, step, micro) for rank in range(world) for micro in range(_NUM_MICRO[program]))


def _reduced(
    rank: int, world: int, reduction: str, program: Program, cap: float | None, carries: bool, set_to_none: bool
) -> str:
    """Train with gradients that are cleared in every step, or only in every second one."""
    build = Branches if program is _three_branches else TwoLayers
    ddp = DistributedDataParallel(build(), reduction=reduction, bucket_cap_mb=cap)
    ddp.counts_weights = reduction == "weighted"
    reference = OneProcess(build(), world, sgd(1 / 64))
    optimizer = sgd(1 / 64)(ddp.parameters())
    for step in range(6):
        divisor = 1 if reduction == "sum" else _total_rows(world, step, program)
        program(ddp, rank, step)
        reference.run(program, step, divisor)
        assert_same_gradients(ddp.module, reference.module, f"step {step}")
        for each in (optimizer, reference.optimizer):
            each.step()
            if step % 2 or not carries:
                each.zero_grad(set_to_none)
    assert_same_state(ddp.module, reference.module)
    return digest(ddp.module)


# A total over tokens divides after the sum, so values are equal up to rounding.
@pytest.mark.parametrize(("carries", "set_to_none"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("cap", [None, 1e-6])
@pytest.mark.parametrize("program", [_one, _three, _three_branches])
@pytest.mark.parametrize("reduction", ["sum", "weighted"])
def test_sums_and_weighted_means(
    ranks: RankPool, reduction: str, program: Program, cap: float | None, carries: bool, set_to_none: bool
) -> None:
    assert_equal_replicas(ranks(_reduced, reduction, program, cap, carries, set_to_none))


@pytest.mark.parametrize("reduction", ["sum", "weighted"])
def test_sums_and_weighted_means_on_three_ranks(ranks3: RankPool, reduction: str) -> None:
    assert_equal_replicas(ranks3(_reduced, reduction, _three_branches, 1e-6, True, True))


def _any_layout(rank: int, world: int, sizes: list[list[int]]) -> list[float]:
    """The same twelve rows, cut into micro-batches of every rank in another way."""
    ddp = DistributedDataParallel(TwoLayers(), reduction="weighted")
    rows = batch(0, 0, 12)
    start = sum(sum(counts) for counts in sizes[:rank])
    for number, count in enumerate(sizes[rank]):
        is_last = number == len(sizes[rank]) - 1
        ddp.add_gradient_weight(count)
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            sq(ddp(rows[start : start + count])).backward()
        start += count
    result: list[float] = ddp.module.a.weight.grad.flatten().tolist()
    return result


def test_any_layout_of_the_batch_gives_the_same_gradient(ranks: RankPool) -> None:
    alone = TwoLayers()
    (sq(alone(batch(0, 0, 12))) / 12).backward()
    assert alone.a.weight.grad is not None
    for sizes in ([[6], [6]], [[1, 2, 3], [6]], [[12], [0]], [[2, 2, 2, 2], [4]], [[0, 5], [7]]):
        for result in ranks(_any_layout, sizes):
            torch.testing.assert_close(torch.tensor(result), alone.a.weight.grad.flatten(), rtol=1e-5, atol=1e-6)


def _large_weights(rank: int, world: int) -> float:
    """Weights that float32 cannot hold exactly."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), reduction="weighted")
    ddp.add_gradient_weight((2**24 + 1, 2**30 + 3)[rank])
    (ddp(torch.ones(1, 1)).sum() * (2**24 + 1 + 2**30 + 3)).backward()
    entry: float = ddp.module.weight.grad.item()
    return entry


def test_large_weights_are_exact_to_float32(ranks: RankPool) -> None:
    assert ranks(_large_weights) == [2.0, 2.0]


def _no_weight(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(TwoLayers(), reduction="weighted")
    return raised(lambda: sq(ddp(batch(rank, 0))).backward())


def test_a_missing_weight_is_told(ranks: RankPool) -> None:
    for text in ranks(_no_weight):
        assert "add_gradient_weight" in text


def _wrong_weights(rank: int, world: int) -> list[str]:
    weighted = DistributedDataParallel(TwoLayers(), reduction="weighted")
    mean = DistributedDataParallel(TwoLayers())
    texts = [raised(lambda value=value: weighted.add_gradient_weight(value)) for value in (-1, float("nan"), 2**44)]
    return [*texts, raised(lambda: mean.add_gradient_weight(3))]


def test_weights_that_make_no_sense(ranks: RankPool) -> None:
    for *values, not_weighted in ranks(_wrong_weights):
        assert all("number of tokens" in text for text in values)
        assert "reduction='weighted'" in not_weighted


def _own_gradients(rank: int, world: int, reduction: str) -> list[float]:
    """all_reduce_grads for what torch.autograd.grad returns."""
    ddp = DistributedDataParallel(Branches("ab"), reduction=reduction)
    parameters = list(ddp.parameters())
    grads = torch.autograd.grad(ddp(batch(rank, 0), "a").sum() * (rank + 1), parameters, allow_unused=True)
    ddp.all_reduce_grads(grads)
    assert all(p.grad is None for p in parameters)
    assert grads[2:] == (None, None)
    assert grads[1] is not None
    return grads[1].tolist()


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 3.0), ("sum", 6.0)])
def test_all_reduce_grads(ranks: RankPool, reduction: str, expected: float) -> None:
    assert ranks(_own_gradients, reduction) == [[expected, expected]] * 2


def _join_with_weights(rank: int, world: int) -> str:
    """A rank that has run out adds neither gradients nor weight."""
    lengths = (2, 4)
    ddp = DistributedDataParallel(TwoLayers(), reduction="weighted")
    reference = OneProcess(TwoLayers(), world, sgd(0.25))
    optimizer = sgd(0.25)(ddp.parameters())
    with ddp.join():
        for step in range(lengths[rank]):
            optimizer.zero_grad()
            ddp.add_gradient_weight(rank + 1)
            sq(ddp(batch(rank, step, rank + 1))).backward()
            optimizer.step()

    def program(model: nn.Module, rank: int, step: int) -> Any:
        if step < lengths[rank]:
            sq(model(batch(rank, step, rank + 1))).backward()

    for step in range(4):
        reference.train(program, step, 3 if step < 2 else 2)
    assert_same_state(ddp.module, reference.module)
    return digest(ddp.module)


def test_join_with_weights(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_join_with_weights))


def _summed_over_windows(rank: int, world: int, reduction: str, freezes: bool, between: str) -> list[float]:
    """A pass; perhaps one with the layer frozen; a backward of each rank alone; something in between; a pass."""
    layer = nn.Linear(1, 1, bias=False)
    other = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(nn.Sequential(layer, other), reduction=reduction)
    nn.init.ones_(other.weight)

    def backward(value: float, synchronises: bool = True) -> None:
        if reduction == "weighted":
            ddp.add_gradient_weight(0.5)
        with contextlib.nullcontext() if synchronises else ddp.no_sync():
            ddp(torch.full((1, 1), float(value))).sum().backward()

    backward(1)
    if freezes:
        layer.requires_grad_(False)
        backward(0)
        layer.requires_grad_(True)
    backward(10 * (rank + 1), synchronises=False)
    if between == "halves":
        layer.weight.grad.mul_(0.5)
    elif between != "nothing":
        ddp.zero_grad(set_to_none=between == "drops")
    backward(100)
    assert isinstance(layer.weight.grad, torch.Tensor)
    result: list[float] = layer.weight.grad.flatten().tolist()
    return result


# By sums: 1 + 1, 10 + 20, 100 + 100. By weights of one half a backward: 2 / 1, and the rest by 2.
@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize(
    ("reduction", "between", "expected"),
    [
        ("sum", "nothing", 232),
        ("sum", "drops", 200),
        ("sum", "zeroes", 200),
        ("weighted", "nothing", 117),
        ("weighted", "drops", 100),
        ("weighted", "zeroes", 100),
    ],
)
def test_what_lies_under_an_unsynchronised_gradient_is_kept_or_cleared_with_it(
    ranks: RankPool, reduction: str, freezes: bool, between: str, expected: float
) -> None:
    assert ranks(_summed_over_windows, reduction, freezes, between) == [[expected]] * 2


@pytest.mark.parametrize("freezes", [False, True])
def test_a_gradient_that_is_changed_over_one_that_was_reduced_is_an_error(ranks: RankPool, freezes: bool) -> None:
    for outcome in ranks.run_expecting(_summed_over_windows, "sum", freezes, "halves"):
        assert outcome.type_name == "ContractError"
        assert "was changed under no_sync(), on top of a gradient that was already reduced" in outcome.text


def _summed_after_a_failure(rank: int, world: int) -> list[float]:
    """A pass; a backward that raises on every rank after its gradient has arrived; a pass."""
    layer = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(layer, reduction="sum")
    ddp(torch.ones(1, 1)).sum().backward()
    handle = layer.weight.register_post_accumulate_grad_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        ddp(torch.ones(1, 1)).sum().backward()
    handle.remove()
    ddp.zero_grad()
    ddp(torch.full((1, 1), 100.0)).sum().backward()
    assert layer.weight.grad is not None
    result: list[float] = layer.weight.grad.flatten().tolist()
    return result


def _fail(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_a_backward_that_raised_leaves_no_sum_behind(ranks: RankPool) -> None:
    assert ranks(_summed_after_a_failure) == [[200.0]] * 2
