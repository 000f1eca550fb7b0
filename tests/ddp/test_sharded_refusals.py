"""What cannot be sharded is refused with a clear error, on all ranks."""

import contextlib
import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import Branches, TwoLayers, plain, raised
from sharded_pair import pair
from torch import nn
from torch.distributed.algorithms.join import Join

from gradsync import DistributedDataParallel, ZeroRedundancyOptimizer
from gradsync.errors import ConfigError, ContractError
from rank_pool import RankPool


class Normed(torch.optim.Optimizer):
    """Steps by the gradient over its norm, so that an element's step depends on the others."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


def _refused(rank: int, world: int, optimizer_class: Any, options: dict[str, Any]) -> str:
    ddp = DistributedDataParallel(TwoLayers())
    return raised(lambda: ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class, ddp=ddp, **options))


@pytest.mark.parametrize(
    ("optimizer_class", "options", "reason"),
    [
        (torch.optim.LBFGS, {}, "LBFGS cannot be sharded"),
        (torch.optim.Muon, {"lr": 0.1}, "Muon cannot be sharded"),
        (torch.optim.Adafactor, {"lr": 0.0}, "Adafactor cannot be sharded"),
        (torch.optim.SparseAdam, {}, "SparseAdam cannot be sharded"),
        (Normed, {"lr": 0.0}, "depends on the rest of the tensor"),
    ],
)
def test_optimizers_that_are_refused(ranks: RankPool, optimizer_class: Any, options: Any, reason: str) -> None:
    for text in ranks(_refused, optimizer_class, options):
        assert text.startswith("ConfigError")
        assert reason in text


def test_wrong_options_are_refused_as_the_optimizer_does(ranks: RankPool) -> None:
    for text in ranks(_refused, torch.optim.SGD, {"lr": -1.0}):
        assert text == "ValueError: Invalid learning rate: -1.0"


@contextlib.contextmanager
def _raises(kind: type[Exception], text: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"nothing was raised instead of {text!r}")


def test_arguments_that_are_refused(ranks: RankPool) -> None:
    ranks(_wrong_arguments)


def _wrong_arguments(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(Branches())
    make = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, lr=0.1)
    with _raises(ConfigError, "but is a Branches"):
        make(ddp.parameters(), ddp=Branches())
    with _raises(ConfigError, "is no parameter of the wrapped module"):
        make([*ddp.parameters(), nn.Parameter(torch.ones(2))], ddp=ddp)
    with _raises(ContractError, "c.bias (1 parameter(s)) are trained"):
        make(list(ddp.parameters())[:-1], ddp=ddp)
    with _raises(ValueError, "empty parameter list"):
        make([], ddp=ddp)
    with _raises(TypeError, "single tensor"):
        make(next(iter(ddp.parameters())), ddp=ddp)
    alone = [dist.new_group([r]) for r in range(world)][rank]
    with _raises(ConfigError, "the replicas are on [0, 1]"):
        make(ddp.parameters(), ddp=ddp, process_group=alone)
    table = DistributedDataParallel(nn.Embedding(4, 3, sparse=True))
    with _raises(ConfigError, "'weight' gets sparse gradients"):
        make(table.parameters(), ddp=table)
    twins = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    twins["b"].weight = nn.Parameter(twins["a"].weight.data)
    wrapped = DistributedDataParallel(twins)
    with _raises(ConfigError, "'a.weight' and 'b.weight' are two parameters in the same memory"):
        make(wrapped.parameters(), ddp=wrapped)


def test_ranks_with_other_optimizers(ranks: RankPool) -> None:
    for text in ranks(_different):
        assert "parameter 'a.bias' has group 1 on rank 0 and 0 on rank 1" in text


def _different(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(TwoLayers())
    named = dict(ddp.module.named_parameters())
    second = [named.pop("b.bias")] + ([named.pop("a.bias")] if rank == 0 else [])
    groups = [{"params": list(named.values())}, {"params": second}]
    return raised(lambda: ZeroRedundancyOptimizer(groups, torch.optim.SGD, ddp=ddp, lr=0.1))


def test_what_does_not_go_together(ranks: RankPool) -> None:
    ranks(_conflicts)


def _conflicts(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ddp, sharded, _ = pair(world)
    with _raises(ConfigError, "no communication hook"):
        ddp.register_comm_hook(None, allreduce_hook)
    with _raises(TypeError, "cannot be copied or pickled"):
        copy.deepcopy(sharded)
    newer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1)
    with _raises(ConfigError, "another one has been made"):
        sharded.step()
    plain(ddp, rank, 0)
    newer.step()
    hooked = DistributedDataParallel(TwoLayers())
    hooked.register_comm_hook(None, allreduce_hook)
    with _raises(ConfigError, "a communication hook is registered"):
        ZeroRedundancyOptimizer(hooked.parameters(), torch.optim.SGD, ddp=hooked, lr=0.1)


def test_a_join_that_does_not_know_the_optimizer(ranks: RankPool) -> None:
    for step, clip in ranks(_join_without):
        assert "Join([ddp, optimizer])" in step
        assert "does not work inside join()" in clip


def _join_without(rank: int, world: int) -> list[str]:
    ddp, sharded, _ = pair(world)
    with Join([ddp]):
        plain(ddp, rank, 0)
        return [raised(sharded.step), raised(lambda: sharded.clip_grad_norm_(1.0))]
