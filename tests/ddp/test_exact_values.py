"""The plain rules in single numbers: what each gradient entry is on rank 0 and on rank 1.

The module is Linear(2,2) without bias, from zero; rank r feeds a row of r + 1 and sums the outputs, so its own
gradient is r + 1 in every entry, and their mean is 1.5.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import bare_linear, ones_row
from torch.nn.parallel import DistributedDataParallel as AnyWrapper

from gradsync import DistributedDataParallel
from rank_pool import RankPool


def _one_backward(ddp: AnyWrapper, rank: int) -> None:
    ddp(ones_row(rank)).sum().backward()


def _two_forwards_one_backward(ddp: AnyWrapper, rank: int) -> None:
    (ddp(ones_row(rank)).sum() + ddp(ones_row(rank)).sum()).backward()


def _two_forwards_two_backwards(ddp: AnyWrapper, rank: int) -> None:
    first, second = ddp(ones_row(rank)).sum(), ddp(ones_row(rank)).sum()
    first.backward()
    second.backward()


def _inside_no_sync(ddp: AnyWrapper, rank: int) -> None:
    with ddp.no_sync():
        _one_backward(ddp, rank)


def _no_sync_then_synchronised(ddp: AnyWrapper, rank: int) -> None:
    _inside_no_sync(ddp, rank)
    _one_backward(ddp, rank)


def _forward_inside_no_sync(ddp: AnyWrapper, rank: int) -> None:
    with ddp.no_sync():
        loss = ddp(ones_row(rank)).sum()
    loss.backward()


def _backward_inside_no_sync(ddp: AnyWrapper, rank: int) -> None:
    loss = ddp(ones_row(rank)).sum()
    with ddp.no_sync():
        loss.backward()


def _synchronised_twice(ddp: AnyWrapper, rank: int) -> None:
    _one_backward(ddp, rank)
    _one_backward(ddp, rank)


def _no_sync_left_by_an_exception(ddp: AnyWrapper, rank: int) -> None:
    with pytest.raises(KeyError), ddp.no_sync():
        raise KeyError
    _one_backward(ddp, rank)


def _nested_no_sync(ddp: AnyWrapper, rank: int) -> None:
    with ddp.no_sync():
        with ddp.no_sync():
            _one_backward(ddp, rank)
        _one_backward(ddp, rank)


def _entries(rank: int, world: int, scenario: Callable[[AnyWrapper, int], None], arguments: dict[str, Any]) -> float:
    ddp = DistributedDataParallel(bare_linear(), **arguments)
    scenario(ddp, rank)
    grad = ddp.module.weight.grad
    assert isinstance(grad, torch.Tensor)
    assert grad.unique().numel() == 1, grad
    return grad[0, 0].item()


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        (_one_backward, [1.5, 1.5]),
        (_two_forwards_one_backward, [3.0, 3.0]),
        (_two_forwards_two_backwards, [3.0, 3.0]),
        (_inside_no_sync, [1.0, 2.0]),
        (_no_sync_then_synchronised, [3.0, 3.0]),
        (_forward_inside_no_sync, [1.5, 1.5]),
        (_backward_inside_no_sync, [1.0, 2.0]),
        (_synchronised_twice, [3.0, 3.0]),
        (_no_sync_left_by_an_exception, [1.5, 1.5]),
        (_nested_no_sync, [2.0, 4.0]),
    ],
)
def test_gradient_entries(
    ranks: RankPool, scenario: Callable[[AnyWrapper, int], None], expected: list[float], as_views: bool
) -> None:
    assert ranks(_entries, scenario, {"gradient_as_bucket_view": as_views}) == expected


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        (_one_backward, [3.0, 3.0]),
        (_two_forwards_two_backwards, [6.0, 6.0]),
        (_no_sync_then_synchronised, [6.0, 6.0]),
        (_inside_no_sync, [1.0, 2.0]),
        (_synchronised_twice, [6.0, 6.0]),
    ],
)
def test_gradient_entries_with_sums(
    ranks: RankPool, scenario: Callable[[AnyWrapper, int], None], expected: list[float]
) -> None:
    assert ranks(_entries, scenario, {"reduction": "sum"}) == expected


def _joined_weight(rank: int, world: int, divide_by_initial_world_size: bool) -> list[float]:
    ddp = DistributedDataParallel(bare_linear())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    with ddp.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for _ in range(rank + 1):
            optimizer.zero_grad()
            _one_backward(ddp, rank)
            optimizer.step()
    return ddp.module.weight.unique().tolist()


@pytest.mark.parametrize(("divide_by_initial_world_size", "expected"), [(True, -2.5), (False, -3.5)])
def test_weights_after_join(ranks: RankPool, divide_by_initial_world_size: bool, expected: float) -> None:
    """Rank 0 has one batch and rank 1 has two."""
    assert ranks(_joined_weight, divide_by_initial_world_size) == [[expected]] * 2
