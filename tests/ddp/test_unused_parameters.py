"""Parameters and outputs that some rank, or no rank, uses: the right gradients without a flag."""

import dataclasses
from typing import Any

import pytest
import torch
from reference import (
    Branches,
    OneProcess,
    TwoHeads,
    assert_equal_replicas,
    assert_same_gradients,
    bare_linear,
    batch,
    in_quarters,
    ones_row,
    plain,
    sgd,
    sq,
    train_alike,
)
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankPool

_FLAGS: list[dict[str, bool]] = [{}, {"find_unused_parameters": True}]


def _two_of_three(model: nn.Module, rank: int, step: int) -> None:
    sq(model(batch(rank, step), "ab")).backward()


def _b_on_rank_0_only(model: nn.Module, rank: int, step: int) -> None:
    sq(model(batch(rank, step), "ab" if rank == 0 else "a")).backward()


@pytest.mark.parametrize("flags", _FLAGS)
def test_a_layer_that_no_rank_uses(ranks: RankPool, flags: dict[str, bool]) -> None:
    assert_equal_replicas(ranks(train_alike, Branches, _two_of_three, steps=1, exact=True, **flags))


@pytest.mark.parametrize("flags", _FLAGS)
def test_a_layer_that_one_rank_uses(ranks: RankPool, flags: dict[str, bool]) -> None:
    assert_equal_replicas(ranks(train_alike, Branches, _b_on_rank_0_only, exact=True, **flags))


def _weight_decay(rank: int, world: int, flags: dict[str, bool]) -> None:
    ddp = DistributedDataParallel(Branches(), **flags)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1, weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
    for step in range(3):
        _b_on_rank_0_only(ddp, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    unmoved = [name for name, p in ddp.module.named_parameters() if torch.equal(p, before[name])]
    assert unmoved == ["c.weight", "c.bias"]


@pytest.mark.parametrize("flags", _FLAGS)
def test_weight_decay_leaves_what_no_rank_uses(ranks: RankPool, flags: dict[str, bool]) -> None:
    ranks(_weight_decay, flags)
    train_as = {"make_optimizer": "adamw", "lr": 0.1, **flags}
    assert_equal_replicas(ranks(train_alike, Branches, _b_on_rank_0_only, **train_as))


def _shared_divisor(rank: int, world: int) -> tuple[list[float], list[float]]:
    model = nn.ModuleDict({"a": bare_linear(), "b": bare_linear()})
    model.forward = lambda x: model["a"](x) + (model["b"](x) if rank == 1 else 0)  # type: ignore[method-assign]
    ddp = DistributedDataParallel(model)
    ddp(ones_row(rank)).sum().backward()
    return [model[name].weight.grad.unique().tolist() for name in "ab"]  # type: ignore[return-value]


def test_one_user_among_two_ranks_is_divided_by_two(ranks: RankPool) -> None:
    assert ranks(_shared_divisor) == [[[1.5], [1.0]]] * 2


class _InTwoHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


def _one_backward_a_half(model: nn.Module, rank: int, step: int) -> None:
    first, second = model(batch(rank, step))
    sq(first).backward()
    sq(second).backward()


def test_two_backwards_over_disjoint_halves(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, _InTwoHalves, _one_backward_a_half, exact=True))


@dataclasses.dataclass
class _Record:
    logits: torch.Tensor
    aux: torch.Tensor


class _Plain:
    def __init__(self, logits: torch.Tensor, aux: torch.Tensor) -> None:
        self.logits = logits
        self.aux = aux


class _BodyAndAux(nn.Module):
    """Returns what ``shape`` makes of the outputs of two layers, body and aux."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.shape = shape
        self.body, self.aux = nn.Linear(3, 2), nn.Linear(3, 2)
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> Any:
        return self.shape(self.body(x), self.aux(x))


def _returns_record() -> nn.Module:
    return _BodyAndAux(_Record)


def _returns_plain_object() -> nn.Module:
    return _BodyAndAux(_Plain)


def _nest(body: torch.Tensor, aux: torch.Tensor) -> dict[str, Any]:
    return {"x": (body, [aux, None]), "n": 5}


def _returns_nested() -> nn.Module:
    return _BodyAndAux(_nest)


def _logits_only(model: nn.Module, rank: int, step: int) -> None:
    sq(model(batch(rank, step)).logits).backward()


def _logits_and_aux(model: nn.Module, rank: int, step: int) -> None:
    output = model(batch(rank, step))
    assert type(output) in (_Plain, _Record)
    (sq(output.logits) + sq(output.aux)).backward()


def _from_nested(model: nn.Module, rank: int, step: int) -> None:
    output = model(batch(rank, step))
    assert type(output) is dict
    assert list(output) == ["x", "n"]
    assert output["n"] == 5
    assert type(output["x"]) is tuple
    assert type(output["x"][1]) is list
    assert output["x"][1][1] is None
    (sq(output["x"][0]) + sq(output["x"][1][0])).backward()


@pytest.mark.parametrize("flags", [*_FLAGS, {"static_graph": True}])
@pytest.mark.parametrize("build", [_returns_record, _returns_plain_object])
def test_outputs_in_an_object(ranks: RankPool, build: Any, flags: dict[str, bool]) -> None:
    assert_equal_replicas(ranks(train_alike, build, _logits_only, exact=True, **flags))
    assert_equal_replicas(ranks(train_alike, build, _logits_and_aux, exact=True, **flags))


@pytest.mark.parametrize("flags", _FLAGS)
def test_a_nested_output_comes_through_unchanged(ranks: RankPool, flags: dict[str, bool]) -> None:
    assert_equal_replicas(ranks(train_alike, _returns_nested, _from_nested, exact=True, **flags))


def _first_head(model: nn.Module, rank: int, step: int) -> None:
    sq(model(batch(rank, step))[0]).backward()


@pytest.mark.parametrize("flags", _FLAGS)
def test_an_output_that_the_loss_leaves_out(ranks: RankPool, flags: dict[str, bool]) -> None:
    assert_equal_replicas(ranks(train_alike, TwoHeads, _first_head, steps=6, lr=0.25, exact=True, **flags))


def _a_head_a_rank(model: nn.Module, rank: int, step: int) -> None:
    sq(model(batch(rank, step))[(rank + step) % 2]).backward()


@pytest.mark.parametrize("cap", [None, 1e-6, float("inf")])
def test_each_rank_uses_another_output(ranks: RankPool, cap: float | None) -> None:
    assert_equal_replicas(ranks(train_alike, TwoHeads, _a_head_a_rank, steps=6, lr=0.25, bucket_cap_mb=cap))


def _nothing_on_rank_1(model: nn.Module, rank: int, step: int) -> None:
    """In step 1 rank 1's loss reaches the wrapper's output, but no parameter."""
    x = batch(rank, step).requires_grad_()
    sq(model(x, "" if rank == 1 and step == 1 else "ab")).backward()


class _MayBypass(Branches):
    def forward(self, x: torch.Tensor, use: str = "") -> torch.Tensor:
        return super().forward(x, use) if use else x * 2


def test_a_rank_whose_loss_reaches_no_parameter(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, _MayBypass, _nothing_on_rank_1, exact=True))


def _presets_stay(rank: int, world: int) -> None:
    """A gradient that is there before backward counts; where no rank uses its parameter, it stays as it is."""
    ddp = DistributedDataParallel(Branches())
    reference = OneProcess(Branches(), world, sgd())
    for module in (ddp.module, reference.module):
        for p in module.parameters():
            p.grad = torch.full_like(p, 7.0)
    preset = ddp.module.c.weight.grad
    _two_of_three(ddp, rank, 0)
    reference.run(_two_of_three, 0)
    assert_same_gradients(ddp.module, reference.module, exact=True)
    assert torch.equal(preset, torch.full((2, 3), 7.0))


def test_a_gradient_of_the_users_own_stays_where_no_rank_uses_the_parameter(ranks: RankPool) -> None:
    ranks(_presets_stay)


def test_usage_that_changes_every_step(ranks: RankPool) -> None:
    for cap in (None, 1e-6):
        assert_equal_replicas(ranks(train_alike, Branches, _alternating, steps=8, lr=0.25, bucket_cap_mb=cap))


def _alternating(model: nn.Module, rank: int, step: int) -> None:
    use = ["abc", "a", "bc", "c", "ab"][(step + 2 * rank) % 5]
    sq(model(batch(rank, step), use)).backward()


def test_everything_used_everywhere(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, Branches, plain, exact=True))
