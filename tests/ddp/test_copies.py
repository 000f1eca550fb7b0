"""Saving, loading, copying and pickling a wrapped module."""

import copy
import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import (
    OneProcess,
    TwoLayers,
    assert_equal_replicas,
    assert_same_gradients,
    assert_same_state,
    batch,
    digest,
    in_quarters,
    plain,
    raised,
    sgd,
    sq,
)
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankPool


class _Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn = nn.Linear(3, 2), nn.BatchNorm1d(2)


def _keys(rank: int, world: int) -> tuple[list[str], list[str]]:
    ddp = DistributedDataParallel(_Normalised())
    return list(ddp.state_dict()), list(ddp.module.state_dict())


def test_keys_of_the_saved_state(ranks: RankPool) -> None:
    bare = list(_Normalised().state_dict())
    assert len(bare) == 7
    assert ranks(_keys) == [(["module." + key for key in bare], bare)] * 2


def _loading(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(TwoLayers())
    saved = in_quarters(TwoLayers(), seed=3)
    assert "Missing key" in raised(lambda: ddp.load_state_dict(saved.state_dict()))
    assert "Unexpected key" in raised(lambda: ddp.load_state_dict({"x.y": torch.ones(2)}))
    ddp.load_state_dict({"module." + key: value for key, value in saved.state_dict().items()})
    assert_same_state(ddp.module, saved, exact=True)
    ddp.module.load_state_dict(TwoLayers().state_dict())
    assert_same_state(ddp.module, TwoLayers(), exact=True)


def test_loading_a_saved_state(ranks: RankPool) -> None:
    ranks(_loading)


def _on_other_batches(model: nn.Module, rank: int, step: int) -> None:
    sq(model(batch(rank, step, which=1))).backward()


def _deep_copy(rank: int, world: int, arguments: dict[str, Any]) -> str:
    ddp = DistributedDataParallel(TwoLayers(), **arguments)
    first = OneProcess(TwoLayers(), world)
    plain(ddp, rank, 0)
    first.run(plain, 0)
    optimizer = sgd()(ddp.parameters())
    for each in (optimizer, first.optimizer):
        each.step()
        each.zero_grad()
    twin = copy.deepcopy(ddp)
    assert type(twin) is DistributedDataParallel
    second = OneProcess(copy.deepcopy(first.module), world)
    optimizers = [optimizer, first.optimizer, sgd()(twin.parameters()), second.optimizer]
    for step in range(1, 4):
        plain(ddp, rank, step)
        _on_other_batches(twin, rank, step)
        first.run(plain, step)
        second.run(_on_other_batches, step)
        assert_same_gradients(ddp.module, first.module, f"step {step}: original", exact=True)
        assert_same_gradients(twin.module, second.module, f"step {step}: copy", exact=True)
        mine, theirs = _storages(ddp), _storages(twin)
        assert not mine & theirs
        for each in optimizers:
            each.step()
            each.zero_grad()
    return digest(ddp.module) + digest(twin.module)


def _storages(ddp: nn.Module) -> set[int]:
    tensors = itertools.chain(*((p, p.grad) for p in ddp.parameters()))
    return {t.untyped_storage().data_ptr() for t in tensors if t is not None}


@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb": 1e-6}, {"gradient_as_bucket_view": True}])
def test_a_deep_copy_is_independent_and_trains(ranks: RankPool, arguments: dict[str, Any]) -> None:
    assert_equal_replicas(ranks(_deep_copy, arguments))


def _deep_copy_in_an_odd_state(rank: int, world: int) -> None:
    """In eval mode, with gradients, with synchronisation switched off."""
    ddp = DistributedDataParallel(TwoLayers())
    plain(ddp, rank, 0)
    ddp.eval()
    ddp.require_backward_grad_sync = False
    twin = copy.deepcopy(ddp)
    assert not twin.training
    assert not twin.module.training
    assert not twin.require_backward_grad_sync
    assert_same_state(twin.module, ddp.module, exact=True)


def test_a_deep_copy_keeps_modes(ranks: RankPool) -> None:
    ranks(_deep_copy_in_an_odd_state)


def _pickled(rank: int, world: int, in_a_group_of_its_own: bool) -> str:
    group = dist.new_group(list(range(world))) if in_a_group_of_its_own else None
    ddp = DistributedDataParallel(TwoLayers(), process_group=group, bucket_cap_mb=1e-6)
    plain(ddp, rank, 0)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert type(twin) is DistributedDataParallel
    assert_same_state(twin.module, ddp.module, exact=True)
    reference = OneProcess(TwoLayers(), world)
    twin.zero_grad()
    plain(twin, rank, 1)
    reference.run(plain, 1)
    assert_same_gradients(twin.module, reference.module, exact=True)
    return digest(twin.module)


@pytest.mark.parametrize("in_a_group_of_its_own", [False, True])
def test_a_pickled_wrapper_trains_on(ranks: RankPool, in_a_group_of_its_own: bool) -> None:
    assert_equal_replicas(ranks(_pickled, in_a_group_of_its_own))
