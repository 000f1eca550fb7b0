"""Gradients that are not cleared between passes, reduced ones and those of one rank alone, while something happens.

A layer is frozen, converted or replaced meanwhile, or passes to another wrapper or group, or a backward raises. Each
layer's gradient is the input, so that expectations can be added up in the head: of 1 in a first pass over all layers,
of ``10 * (rank + 1)`` in a backward of each rank alone, and of 100 in the last pass.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradsync import DistributedDataParallel, ZeroRedundancyOptimizer
from rank_pool import RankPool

Values = list[float | None]


class _Layers(nn.Module):
    """Layers a, b and c of one weight each; a may be a sparse table."""

    def __init__(self, is_sparse: bool = False) -> None:
        super().__init__()
        for name in "abc":
            setattr(self, name, nn.Linear(1, 1, bias=False))
        if is_sparse:
            self.a = nn.Embedding(4, 2, sparse=True)  # of a width of 1 torch adds nothing to a dense gradient

    def forward(self, use: str, value: float) -> torch.Tensor:
        parts = []
        for layer in (getattr(self, name) for name in use):
            if isinstance(layer, nn.Embedding):
                parts.append(layer(torch.tensor([dist.get_rank()])).sum() * value / 2)
            else:
                parts.append(layer(torch.full((1, 1), float(value), dtype=layer.weight.dtype)).sum())
        return torch.stack([part.float() for part in parts]).sum()


def _wrapped(reduction: str, cap: float | None = None, module: nn.Module | None = None) -> Any:
    return DistributedDataParallel(module or _Layers(), reduction=reduction, bucket_cap_mb=cap)


def _begun(reduction: str, cap: float | None, module: nn.Module | None = None) -> Any:
    """Layers that have a reduced gradient each."""
    ddp = _wrapped(reduction, cap, module)
    _pass(ddp, "abc", 1)
    return ddp


def _pass(ddp: Any, use: str, value: float) -> None:
    ddp(use, value).backward()


def _alone(ddp: Any, use: str, rank: int) -> None:
    with ddp.no_sync():
        ddp(use, 10 * (rank + 1)).backward()


def _gradients(ddp: Any) -> Values:
    grads = [getattr(ddp.module, name).weight.grad for name in "abc"]
    return [None if grad is None else float(grad.to_dense().sum()) for grad in grads]


def _full_gradients(optimizer: Any, ddp: Any) -> Values:
    full = [optimizer.full_gradient(p) for p in ddp.module.parameters()]
    return [None if grad is None else float(grad) for grad in full]


def _fail(_: torch.Tensor) -> None:
    raise ZeroDivisionError


# ----------------------------------------------------------------- parameters change


def _frozen_again(rank: int, reduction: str, cap: float | None) -> Values:
    """Layer c has a reduced gradient, layer a none, when both are trained in a window only, and then are frozen."""
    ddp = _wrapped(reduction, cap)
    ddp.module.a.requires_grad_(False)
    _pass(ddp, "bc", 1)
    ddp.module.c.requires_grad_(False)
    _pass(ddp, "b", 1)
    ddp.module.requires_grad_(True)
    _alone(ddp, "abc", rank)
    for layer in (ddp.module.a, ddp.module.c):
        layer.requires_grad_(False)
    _pass(ddp, "b", 100)
    between = _gradients(ddp)
    ddp.module.requires_grad_(True)
    _pass(ddp, "b", 0)
    assert _gradients(ddp) == between
    return between


def _converted(rank: int, reduction: str, cap: float | None) -> Values:
    ddp = _begun(reduction, cap)
    _alone(ddp, "b", rank)
    ddp.module.double()
    _pass(ddp, "a", 100)
    return _gradients(ddp)


def _replaced(rank: int, reduction: str, cap: float | None) -> Values:
    """Again and again, so that a new parameter comes to lie where an old one was."""
    ddp = _begun(reduction, cap)
    for _ in range(10):
        ddp.module.b.weight = nn.Parameter(torch.ones(1, 1))
        _pass(ddp, "b", 1)
    _alone(ddp, "a", rank)
    _pass(ddp, "b", 100)
    return _gradients(ddp)


# ----------------------------------------------------------------- wrappers, groups and optimizers change


def _wrapped_again(rank: int, reduction: str, cap: float | None) -> Values:
    first = _begun(reduction, cap)
    _alone(first, "ab", rank)
    second = _wrapped(reduction, cap, first.module)
    _pass(second, "a", 100)
    return _gradients(second)


def _wrapped_for_a_while(rank: int, reduction: str, cap: float | None) -> Values:
    first = _wrapped(reduction, cap)
    second = _wrapped(reduction, cap, first.module)
    _pass(second, "abc", 1)
    _alone(second, "ab", rank)
    del second
    gc.collect()
    _pass(first, "a", 100)
    return _gradients(first)


def _wrapped_for_a_while_with_a_graph_left(rank: int, reduction: str, cap: float | None) -> Values:
    """The last loss of the wrapper that is gone is still there."""
    first = _wrapped(reduction, cap)
    second = _wrapped(reduction, cap, first.module)
    loss = second("abc", 1)
    loss.backward()
    _alone(second, "ab", rank)
    del second
    gc.collect()
    third = _wrapped(reduction, cap, first.module)
    del third
    gc.collect()
    _pass(first, "a", 100)
    assert loss.requires_grad
    return _gradients(first)


def _frozen_and_wrapped_again(rank: int, reduction: str, cap: float | None) -> Values:
    """Layer c is frozen when it is wrapped anew; b with something that is not reduced, through two wrappers."""
    first = _begun(reduction, cap)
    first.module.c.requires_grad_(False)
    _alone(first, "ab", rank)
    first.module.b.requires_grad_(False)
    second = _wrapped(reduction, cap, first.module)
    third = _wrapped(reduction, cap, first.module)
    first.module.c.requires_grad_(True)
    _pass(third, "ac", 100)
    del second
    return _gradients(third)


def _trained_again_after_wrapping(rank: int, reduction: str, cap: float | None) -> Values:
    first = _begun(reduction, cap)
    _alone(first, "b", rank)
    first.module.b.requires_grad_(False)
    second = _wrapped(reduction, cap, first.module)
    second.module.b.requires_grad_(True)
    _alone(second, "ab", rank)
    second.module.b.requires_grad_(False)
    _pass(second, "a", 100)
    return _gradients(second)


def _raised_in_another_wrapper(rank: int, reduction: str, cap: float | None) -> Values:
    """The sum was put aside by a first wrapper; a backward of the second raises, and all is cleared."""
    first = _begun(reduction, cap)
    _alone(first, "b", rank)
    second = _wrapped(reduction, cap, first.module)
    handle = second.module.b.weight.register_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        _alone(second, "b", rank)
    handle.remove()
    second.zero_grad()
    _pass(second, "abc", 100)
    return _gradients(second)


def _in_another_group(rank: int, reduction: str, cap: float | None) -> Values:
    ddp = _begun(reduction, cap)
    ddp.module.c.requires_grad_(False)
    _pass(ddp, "b", 0)
    _alone(ddp, "ab", rank)
    ddp._update_process_group(dist.new_group([0, 1]))
    ddp.module.c.requires_grad_(True)
    _pass(ddp, "a", 100)
    return _gradients(ddp)


def _sharded_in_between(rank: int, reduction: str, cap: float | None) -> Values:
    ddp = _begun(reduction, cap)
    _alone(ddp, "ab", rank)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, ddp=ddp)
    _pass(ddp, "a", 100)
    return _full_gradients(optimizer, ddp)


def _sharded_and_frozen_again(rank: int, reduction: str, cap: float | None) -> Values:
    ddp = _wrapped(reduction, cap)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, ddp=ddp)
    ddp.module.b.requires_grad_(False)
    _pass(ddp, "ac", 1)
    ddp.module.c.requires_grad_(False)
    _pass(ddp, "a", 0)
    ddp.module.requires_grad_(True)
    _alone(ddp, "abc", rank)
    for layer in (ddp.module.b, ddp.module.c):
        layer.requires_grad_(False)
    _pass(ddp, "a", 100)
    return _full_gradients(optimizer, ddp)


# ----------------------------------------------------------------- sparse tables


def _sparse_table(rank: int, reduction: str, cap: float | None) -> Values:
    """Layer a, a table, is frozen with a gradient, and trained again: unused in one pass, used in the next two."""
    ddp = _begun(reduction, cap, _Layers(is_sparse=True))
    ddp.module.a.requires_grad_(False)
    _pass(ddp, "b", 0)
    ddp.module.a.requires_grad_(True)
    _pass(ddp, "b", 0)
    _pass(ddp, "a", 50)
    ddp._update_process_group(dist.new_group([0, 1]))
    _pass(ddp, "a", 50)
    return _gradients(ddp)


def _sparse_table_used_at_once(rank: int, reduction: str, cap: float | None) -> Values:
    ddp = _begun(reduction, cap, _Layers(is_sparse=True))
    ddp.module.a.requires_grad_(False)
    _pass(ddp, "b", 0)
    ddp.module.a.requires_grad_(True)
    _alone(ddp, "a", rank)
    _pass(ddp, "a", 50)
    _pass(ddp, "a", 50)
    return _gradients(ddp)


# ----------------------------------------------------------------- a backward raises


def _raised_alone(rank: int, reduction: str, cap: float | None) -> Values:
    """A backward of each rank alone raises before anything was added to b, and is gone on from."""
    ddp = _begun(reduction, cap)
    handle = ddp.module.b.weight.register_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        _alone(ddp, "b", rank)
    handle.remove()
    assert _gradients(ddp)[1] == (2 if reduction == "sum" else 1)
    _pass(ddp, "a", 100)
    return _gradients(ddp)


def _raised_alone_and_cleared(rank: int, reduction: str, cap: float | None) -> Values:
    ddp = _begun(reduction, cap)
    for hang in ("register_hook", "register_post_accumulate_grad_hook"):
        handle = getattr(ddp.module.b.weight, hang)(_fail)
        with pytest.raises(ZeroDivisionError):
            _alone(ddp, "abc", rank)
        handle.remove()
        ddp.zero_grad()
        _pass(ddp, "abc", 100)
    return _gradients(ddp)


def _raised_while_unfrozen(rank: int, reduction: str, cap: float | None) -> Values:
    """What a pass that raised has left on a layer that was not planned yet is dropped like the rest."""
    ddp = _wrapped(reduction, cap)
    ddp.module.c.requires_grad_(False)
    _pass(ddp, "ab", 1)
    ddp.module.c.requires_grad_(True)
    handle = ddp.module.a.weight.register_post_accumulate_grad_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        _pass(ddp, "abc", 10)
    handle.remove()
    assert _gradients(ddp) == [None, None, None]
    _pass(ddp, "abc", 100)
    return _gradients(ddp)


def _reset(rank: int, reduction: str, cap: float | None) -> Values:
    ddp = _begun(reduction, cap)
    launch = ddp.reducer.groups.sum_bucket

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    ddp.reducer.groups.sum_bucket = fail
    with pytest.raises(ZeroDivisionError):
        _pass(ddp, "abc", 10)
    ddp.reducer.groups.sum_bucket = launch
    ddp.reset_after_failure()
    assert _gradients(ddp) == [None, None, None]
    _pass(ddp, "abc", 100)
    return _gradients(ddp)


Scenario = Callable[[int, str, float | None], Values]


def _run(rank: int, world: int, scenario: Scenario, reduction: str, cap: float | None) -> Values:
    return scenario(rank, reduction, cap)


@pytest.mark.parametrize("cap", [None, 1e-6])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    ("scenario", "sums"),
    [
        (_frozen_again, [30, 234, 32]),
        (_converted, [202, 32, 2]),
        (_replaced, [32, 202, 2]),
        (_wrapped_again, [232, 32, 2]),
        (_wrapped_for_a_while, [232, 32, 2]),
        (_wrapped_for_a_while_with_a_graph_left, [232, 32, 2]),
        (_frozen_and_wrapped_again, [232, 32, 202]),
        (_trained_again_after_wrapping, [232, 62, 2]),
        (_raised_in_another_wrapper, [200, 200, 200]),
        (_in_another_group, [232, 32, 2]),
        (_sharded_in_between, [232, 32, 2]),
        (_sharded_and_frozen_again, [232, 30, 32]),
        (_sparse_table, [202, 2, 2]),
        (_sparse_table_used_at_once, [232, 2, 2]),
        (_raised_alone, [202, 2, 2]),
        (_raised_alone_and_cleared, [200, 200, 200]),
        (_raised_while_unfrozen, [200, 200, 200]),
        (_reset, [200, 200, 200]),
    ],
)
def test_kept_gradients(
    ranks: RankPool, scenario: Scenario, sums: list[float], reduction: str, cap: float | None
) -> None:
    expected = [total if reduction == "sum" else total / 2 for total in sums]
    assert ranks(_run, scenario, reduction, cap) == [expected, expected]


# ----------------------------------------------------------------- errors


def _no_weight(rank: int, world: int) -> Values:
    """A pass that is refused for want of a weight leaves nothing of an earlier one either."""
    ddp = _wrapped("weighted")
    for weight in (0.5, None, 0.5):
        if weight is not None:
            ddp.add_gradient_weight(weight)
            _pass(ddp, "abc", 100)
            continue
        with pytest.raises(Exception, match="needs a gradient weight"):
            _pass(ddp, "abc", 10)
        assert _gradients(ddp) == [None, None, None]
    return _gradients(ddp)


def test_a_pass_without_weight_leaves_nothing(ranks: RankPool) -> None:
    assert ranks(_no_weight) == [[200, 200, 200]] * 2


def _changed(rank: int, world: int, changers: list[int], cap: float | None, ends_by: str) -> tuple[list[str], Values]:
    """Layer b's gradient is changed where it must not be; the pass after that does not reach it."""
    ddp = _begun("sum", cap)
    _alone(ddp, "abc", rank)
    if rank in changers:
        ddp.module.b.weight.grad.mul_(0.5)
        ddp.module.c.weight.grad.mul_(0.5)
    errors = []
    actions = [lambda: ddp.sync_gradients() if ends_by == "sync" else _pass(ddp, "a", 100)]
    if changers == [rank]:
        actions.append(lambda: ddp("a", 1))
    for action in actions:
        with pytest.raises(Exception) as raised:
            action()
        errors.append(str(raised.value))
    assert _gradients(ddp) == [None, None, None]
    _pass(ddp, "abc", 100)
    return errors, _gradients(ddp)


@pytest.mark.parametrize("ends_by", ["sync", "backward"])
@pytest.mark.parametrize("cap", [None, 1e-6])
@pytest.mark.parametrize("changers", [[0, 1], [0]])
def test_a_change_that_is_refused_is_told_to_all_ranks(
    ranks: RankPool, changers: list[int], cap: float | None, ends_by: str
) -> None:
    outcomes = ranks(_changed, changers, cap, ends_by)
    for rank, (errors, gradients) in enumerate(outcomes):
        expected = "was changed under no_sync()" if rank in changers else "rank(s) 0 raised an exception"
        assert expected in errors[0]
        assert gradients == [200, 200, 200]
