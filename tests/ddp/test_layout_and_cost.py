"""Memory layout of gradients, who owns them, and what synchronisation costs where it is not needed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference import (
    Branches,
    OneProcess,
    TwoLayers,
    assert_equal_replicas,
    assert_same_gradients,
    assert_same_state,
    batch,
    digest,
    in_quarters,
    num_collectives,
    plain,
    sgd,
    sq,
    unsynced,
    whole_numbers,
)
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankPool


@pytest.fixture(scope="module")
def alone() -> Iterator[RankPool]:
    """A world of one rank."""
    pool = RankPool(1)
    yield pool
    pool.close()


def _three_micro_steps(model: nn.Module, rank: int, step: int) -> None:
    with unsynced(model):
        for micro in range(2):
            sq(model(batch(rank, step, which=micro))).backward()
    sq(model(batch(rank, step, which=2))).backward()


def _all_combinations(rank: int, world: int) -> None:
    for as_views in (False, True):
        for set_to_none in (False, True):
            for program in (plain, _three_micro_steps):
                for replaces in (False, True):
                    _five_steps(rank, world, as_views, set_to_none, program, replaces)


def _five_steps(rank: int, world: int, as_views: bool, set_to_none: bool, program: Any, replaces: bool) -> None:
    ddp = DistributedDataParallel(TwoLayers(), gradient_as_bucket_view=as_views)
    reference = OneProcess(TwoLayers(), world, sgd(0.125))
    optimizer = sgd(0.125)(ddp.parameters())
    for step in range(5):
        optimizer.zero_grad(set_to_none)
        if replaces:
            for p in ddp.parameters():
                p.grad = torch.zeros_like(p)
        program(ddp, rank, step)
        optimizer.step()
        reference.train(program, step)
    assert_same_state(ddp.module, reference.module, f"{as_views, set_to_none, program, replaces}", exact=True)


def test_views_accumulation_clearing_and_replaced_gradients(ranks: RankPool) -> None:
    ranks(_all_combinations)


def _one_by_one(rank: int, world: int, as_views: bool) -> str:
    """The gradients that the user presets have other strides than the weight, in dimensions of size 1 only."""
    build = lambda: in_quarters(nn.Conv2d(4, 8, 1).to(memory_format=torch.channels_last))  # noqa: E731
    ddp = DistributedDataParallel(build(), gradient_as_bucket_view=as_views)
    reference = OneProcess(build(), world)
    assert ddp.module.weight.stride() == (4, 1, 4, 4)
    for step in range(3):
        for module in (ddp.module, reference.module):
            for p in module.parameters():
                p.grad = torch.zeros(p.shape)
        _on_images(ddp, rank, step)
        reference.run(_on_images, step)
        assert_same_gradients(ddp.module, reference.module, f"step {step}", exact=True)
    return digest(ddp.module)


def _on_images(model: nn.Module, rank: int, step: int) -> None:
    sq(model(whole_numbers(1, 4, 3, 3, key=(rank, step)))).backward()


@pytest.mark.parametrize("as_views", [False, True])
def test_no_warning_of_strides_that_do_not_matter(ranks: RankPool, as_views: bool) -> None:
    for found, warned in ranks.run_with_warnings(_one_by_one, as_views):
        assert found
        assert warned == []


class _Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(x))


def _on_one_rank(rank: int, world: int) -> int:
    ddp, bare = DistributedDataParallel(_Normalised()), _Normalised()
    before = num_collectives()
    optimizers = [sgd()(m.parameters()) for m in (ddp, bare)]
    for step in range(3):
        for model, optimizer in zip((ddp, bare), optimizers, strict=True):
            optimizer.zero_grad()
            sq(model(batch(rank, step, rows=4)) - 1).backward()
        assert_same_gradients(ddp.module, bare, exact=True)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_state(ddp.module, bare, exact=True)
    return num_collectives() - before


def test_one_rank_sets_no_hooks_that_autograd_would_look_at(alone: RankPool) -> None:
    assert alone(_hooks_on_one_rank) == [[None, None]]


def _hooks_on_one_rank(rank: int, world: int) -> list[object]:
    module = nn.Linear(2, 1)
    DistributedDataParallel(module)
    return [p._post_accumulate_grad_hooks for p in module.parameters()]


def test_one_rank_issues_no_collective(alone: RankPool) -> None:
    assert alone(_on_one_rank) == [0]


def _all_features_alone(rank: int, world: int) -> None:
    """Everything there is to call works on one rank too."""
    ddp = DistributedDataParallel(_Normalised())
    optimizer = sgd()(ddp.parameters())
    with ddp.join():
        with ddp.no_sync():
            sq(ddp(batch(rank, 0, rows=4))).backward()
        ddp.sync_gradients()
        optimizer.step()
    ddp.sync_buffers()
    ddp.sync_buffers("mean")
    ddp.verify_replicas()
    ddp.register_comm_hook(None, _doubling)
    optimizer.zero_grad()
    single = _Normalised()
    single.load_state_dict(ddp.module.state_dict())
    for model in (ddp, single):
        sq(model(batch(rank, 1, rows=4)) - 1).backward()
    for p, q in zip(ddp.module.parameters(), single.parameters(), strict=True):
        assert torch.equal(p.grad, 2 * q.grad)


def _doubling(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future


def test_the_whole_surface_on_one_rank(alone: RankPool) -> None:
    alone(_all_features_alone)


def _needless_search(rank: int, world: int, module: type[nn.Module]) -> None:
    ddp = DistributedDataParallel(module(), find_unused_parameters=True)
    for step in range(8):
        output = ddp(batch(rank, step), "ab") if module is Branches else ddp(batch(rank, step))
        sq(output).backward()
        ddp.zero_grad()


def test_a_needless_search_for_unused_parameters_is_mentioned_once(ranks: RankPool) -> None:
    messages = [warned for _, warned in ranks.run_with_warnings(_needless_search, TwoLayers)]
    assert len(messages[0]) == 1
    assert "find_unused_parameters" in messages[0][0]
    assert messages[1] in ([], messages[0])
    assert all(warned == [] for _, warned in ranks.run_with_warnings(_needless_search, Branches))


# ----------------------------------------------------------------- gradients that somebody still holds


def _held(rank: int, world: int, arguments: dict[str, Any]) -> None:
    """Whatever the user keeps of an earlier step keeps its values, however it is held."""
    ddp = DistributedDataParallel(TwoLayers(), **arguments)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(6):
        plain(ddp, rank, step)
        weight, bias = ddp.module.a.weight.grad, ddp.module.b.bias.grad
        held = [weight, weight[0], weight.detach(), bias, bias.view(-1)][step % 5]
        kept.append((held, held.clone()))
        del weight, bias, held
        ddp.zero_grad()
        for now, then in kept:
            assert torch.equal(now, then), f"step {step}"


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-6}])
def test_gradients_that_are_still_held_are_never_overwritten(ranks: RankPool, arguments: dict[str, Any]) -> None:
    ranks(_held, arguments)


def _swapped(rank: int, world: int) -> None:
    """The user moves gradients between parameters and steps; nothing may alias."""
    ddp = DistributedDataParallel(TwoLayers())
    reference = OneProcess(TwoLayers(), world)
    plain(ddp, rank, 0)
    saved = {name: p.grad for name, p in ddp.module.named_parameters()}
    values = {name: grad.clone() for name, grad in saved.items() if grad is not None}
    ddp.zero_grad()
    plain(ddp, rank, 1)
    reference.run(plain, 1)
    assert_same_gradients(ddp.module, reference.module, "second", exact=True)
    for name, p in ddp.module.named_parameters():
        assert torch.equal(saved[name], values[name])
        p.grad = saved[name]  # back to the first step's gradients
    ddp.sync_gradients()
    for name, p in ddp.module.named_parameters():
        assert torch.equal(p.grad, values[name]), name


def test_gradients_put_back_by_the_user(ranks: RankPool) -> None:
    ranks(_swapped)


def _no_new_memory(rank: int, world: int) -> set[int]:
    """Step after step the same memory is used, when nobody holds on to it."""
    ddp = DistributedDataParallel(TwoLayers())
    seen = set()
    for step in range(6):
        plain(ddp, rank, step)
        if step > 1:
            seen.add(ddp.module.a.weight.grad.untyped_storage().data_ptr())
        ddp.zero_grad()
    return seen


def test_gradients_reuse_their_memory(ranks: RankPool) -> None:
    for seen in ranks(_no_new_memory):
        assert len(seen) == 1


def _detaches(rank: int, world: int) -> str:
    """``zero_grad(set_to_none=False)`` and users call ``grad.detach_()``, which torch forbids on views."""
    ddp = DistributedDataParallel(TwoLayers(), gradient_as_bucket_view=True)
    for step in range(3):
        plain(ddp, rank, step)
        for p in ddp.parameters():
            p.grad.detach_()
            p.grad.zero_()
    assert_equal_replicas([digest(ddp.module)])
    return digest(ddp.module)


def test_gradients_can_be_detached_in_place(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_detaches))
