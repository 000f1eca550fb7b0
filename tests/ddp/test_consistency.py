"""Replicas that are not equal are found: at construction, on demand, and when collectives get mixed up."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import Branches, TwoLayers, batch, impatient_group, plain, raised, sgd, sq
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankFailure, RankPool


def _extra_layer(rank: int) -> nn.Module:
    module = Branches("ab")
    if rank == 1:
        module.extra = nn.Linear(3, 2)
    return module


def _other_dtype(rank: int) -> nn.Module:
    module = Branches("ab")
    if rank == 1:
        module.b.double()
    return module


def _other_shape(rank: int) -> nn.Module:
    module = Branches("ab")
    if rank == 1:
        module.b = nn.Linear(3, 4)
    return module


def _other_order(rank: int) -> nn.Module:
    layers = {name: nn.Linear(3, 3) for name in ("ab", "ba")[rank]}
    return nn.ModuleDict(layers)


def _other_name(rank: int) -> nn.Module:
    return nn.ModuleDict({("a", "z")[rank]: nn.Linear(3, 3)})


def _other_strides(rank: int) -> nn.Module:
    module = nn.Linear(3, 3)
    if rank == 1:
        module.weight = nn.Parameter(module.weight.detach().t())
    return module


def _other_trainability(rank: int) -> nn.Module:
    module = Branches("ab")
    module.b.weight.requires_grad_(rank == 0)
    return module


def _other_buffer(rank: int) -> nn.Module:
    module = Branches("ab")
    module.register_buffer("seen", torch.zeros(rank + 1))
    return module


def _fewer_layers_on_rank_1(rank: int) -> nn.Module:
    return Branches(("abc", "ab")[rank])


def _differing(rank: int, world: int, build: Any) -> str:
    return raised(lambda: DistributedDataParallel(build(rank)))


@pytest.mark.parametrize(
    ("build", "fragments"),
    [
        (_extra_layer, ["extra.weight", "rank 1"]),
        (_fewer_layers_on_rank_1, ["c.weight", "rank 1"]),
        (_other_dtype, ["b.weight", "float64", "float32"]),
        (_other_shape, ["b.weight", "(2, 3)", "(4, 3)"]),
        (_other_order, ["a.weight", "b.weight", "order"]),
        (_other_name, ["a.weight"]),
        (_other_strides, ["weight", "strides", "(3, 1)", "(1, 3)"]),
        (_other_trainability, ["b.weight", "requires_grad"]),
        (_other_buffer, ["seen", "(1,)", "(2,)"]),
    ],
)
def test_a_model_that_differs_is_refused_on_all_ranks(ranks: RankPool, build: Any, fragments: list[str]) -> None:
    for text in ranks(_differing, build):
        for fragment in fragments:
            assert fragment in text


def _differing_on_rank_2(rank: int, world: int) -> str:
    return raised(lambda: DistributedDataParallel(_other_shape(max(rank - 1, 0))))


def test_the_rank_that_differs_is_named(ranks3: RankPool) -> None:
    for text in ranks3(_differing_on_rank_2):
        assert "rank 2" in text


def _other_arguments(rank: int, world: int, name: str, values: list[Any]) -> str:
    return raised(lambda: DistributedDataParallel(TwoLayers(), **{name: values[rank]}))


@pytest.mark.parametrize(
    ("name", "values"),
    [("bucket_cap_mb", [25, 1]), ("reduction", ["mean", "sum"]), ("forward_sync_buffers", [True, False])],
)
def test_arguments_that_differ_are_refused_on_all_ranks(ranks: RankPool, name: str, values: list[Any]) -> None:
    for text in ranks(_other_arguments, name, values):
        assert name.removesuffix("_cap_mb") in text
        assert "rank 1" in text


def _verified(rank: int, world: int, is_buffer: bool) -> str:
    module = TwoLayers()
    module.register_buffer("seen", torch.zeros(3))
    ddp = DistributedDataParallel(module)
    optimizer = sgd()(ddp.parameters())
    for step in range(2):
        optimizer.zero_grad()
        plain(ddp, rank, step)
        optimizer.step()
    ddp.verify_replicas()
    changed = ddp.module.seen if is_buffer else ddp.module.b.weight.detach()
    right = changed.clone()
    if rank == 1:
        changed[-1] += 0.5
    text = raised(ddp.verify_replicas)
    changed.copy_(right)
    ddp.verify_replicas()
    return text


@pytest.mark.parametrize(("is_buffer", "name"), [(False, "b.weight"), (True, "seen")])
def test_verify_replicas_names_what_differs(ranks: RankPool, is_buffer: bool, name: str) -> None:
    for text in ranks(_verified, is_buffer):
        assert f"'{name}'" in text
        assert "rank(s) 1" in text


def _verified_where_zeros_have_signs(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(TwoLayers())
    with torch.no_grad():
        ddp.module.a.bias.fill_(-0.0 if rank else 0.0)
    return raised(ddp.verify_replicas)


def test_verify_replicas_compares_bits(ranks: RankPool) -> None:
    for text in ranks(_verified_where_zeros_have_signs):
        assert "a.bias" in text


def _foreign_collective(rank: int, world: int) -> None:
    group = impatient_group(world)
    ddp = DistributedDataParallel(TwoLayers(), process_group=group)
    optimizer = sgd()(ddp.parameters())
    for step in range(5):
        if (rank, step) == (1, 2):
            dist.all_reduce(torch.ones(7), group=group)
        optimizer.zero_grad()
        sq(ddp(batch(rank, step))).backward()
        optimizer.step()


def test_a_foreign_collective_is_never_mixed_with_a_gradient(ranks: RankPool) -> None:
    """Rank 1 waits in a collective of its own that nobody joins, and rank 0 waits for rank 1."""
    for outcome in ranks.run_expecting(_foreign_collective, timeout_s=90.0):
        assert isinstance(outcome, RankFailure)
        assert outcome.type_name != "Died"


def _foreign_collectives_between(rank: int, world: int) -> None:
    """Collectives of the user's own while gradients are under way, waited for at other moments on each rank."""
    ddp = DistributedDataParallel(TwoLayers(), bucket_cap_mb=1e-6)
    works = []
    for step in range(4):
        loss = sq(ddp(batch(rank, step)))
        works.append((tensor := torch.ones(3), dist.all_reduce(tensor, async_op=True)))
        if rank == 0:
            works[-1][1].wait()
        loss.backward()
    for tensor, work in works:
        work.wait()
        assert torch.equal(tensor, torch.full((3,), float(world)))


def test_collectives_of_the_user_in_between(ranks: RankPool) -> None:
    ranks(_foreign_collectives_between)
