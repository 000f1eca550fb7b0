"""Optimizers that step inside backward: each must see the gradient of all ranks."""

from typing import Any

import pytest
import torch
from reference import (
    Branches,
    OneProcess,
    TwoLayers,
    adamw,
    assert_near,
    batch,
    digest,
    plain,
    raised,
    sgd,
    sq,
    unsynced,
)
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankPool


def _in_backward(parameters: Any, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(optimizer, parameters, options or {"lr": 0.5})


def _assert_same(ddp: nn.Module, reference: nn.Module, when: str) -> None:
    wanted = dict(reference.named_parameters())
    for name, p in ddp.named_parameters():
        assert_near(p, wanted[name], f"{when} {name}")


def _steps_in_backward(rank: int, world: int, applied: str, arguments: dict[str, Any]) -> str:
    module = TwoLayers()
    if applied == "before wrapping":
        _in_backward(module.parameters())
    ddp = DistributedDataParallel(module, **arguments)
    if applied == "after wrapping":
        _in_backward(module.parameters())
    reference = OneProcess(TwoLayers(), world, sgd(0.5))
    for step in range(4):
        if applied == "in the middle" and step < 2:
            plain(ddp, rank, step)
            reference.run(plain, step)
            ddp.zero_grad()
            reference.module.zero_grad()
            continue
        if applied == "in the middle" and step == 2:
            _in_backward(module.parameters())
        plain(ddp, rank, step)
        reference.train(plain, step)
        _assert_same(module, reference.module, f"step {step}")
        assert all(p.grad is None for p in module.parameters())
    return digest(module)


@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb": 1e-6}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("applied", ["before wrapping", "after wrapping", "in the middle"])
def test_optimizers_hung_on_parameters(ranks: RankPool, applied: str, arguments: dict[str, Any]) -> None:
    first, second = ranks(_steps_in_backward, applied, arguments, warnings_as_errors=False)
    assert first == second


def _two_on_one(rank: int, world: int) -> None:
    """A second optimizer is hung on a parameter that has one already, in the middle of training."""
    module = TwoLayers()
    ddp = DistributedDataParallel(module)
    reference = OneProcess(TwoLayers(), world, sgd(0.5))
    _in_backward(module.parameters(), lr=0.5)
    plain(ddp, rank, 0)
    reference.train(plain, 0)
    _in_backward(module.parameters(), lr=0.25)
    reference.optimizer.param_groups[0]["lr"] = 0.75
    for step in (1, 2):
        plain(ddp, rank, step)
        reference.train(plain, step)
        _assert_same(module, reference.module, f"step {step}")


def test_two_optimizers_on_one_parameter(ranks: RankPool) -> None:
    ranks(_two_on_one, warnings_as_errors=False)


def _some_parameters(rank: int, world: int) -> None:
    """Only layer a steps in backward; b keeps its gradient for an optimizer of the user's; c is used nowhere."""
    module = Branches()
    ddp = DistributedDataParallel(module)
    _in_backward(module.a.parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    _in_backward(module.c.parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    optimizer = torch.optim.SGD(module.b.parameters(), lr=0.5)
    before = module.c.weight.detach().clone()
    reference = Branches()
    replicas = OneProcess(reference, world)
    optimizers = [
        torch.optim.AdamW(reference.a.parameters(), lr=0.1, weight_decay=0.5),
        torch.optim.SGD(reference.b.parameters(), lr=0.5),
    ]

    def program(model: nn.Module, rank: int, step: int) -> None:
        sq(model(batch(rank, step), "ab" if rank == 0 else "a")).backward()

    for step in range(3):
        program(ddp, rank, step)
        assert all(p.grad is None for p in module.a.parameters())
        assert all(p.grad is not None for p in module.b.parameters())
        optimizer.step()
        optimizer.zero_grad()
        replicas.run(program, step)
        for each in optimizers:
            each.step()
            each.zero_grad()
        _assert_same(module, reference, f"step {step}")
    assert torch.equal(module.c.weight, before)  # no decay where there is no gradient


def test_some_parameters_only(ranks: RankPool) -> None:
    ranks(_some_parameters, warnings_as_errors=False)


def _accumulating(rank: int, world: int) -> None:
    """Under no_sync nothing steps; the step comes with the synchronised backward, on the whole gradient."""
    module = TwoLayers()
    ddp = DistributedDataParallel(module)
    _in_backward(module.parameters())
    reference = OneProcess(TwoLayers(), world, sgd(0.5))

    def program(model: nn.Module, rank: int, step: int) -> None:
        with unsynced(model):
            sq(model(batch(rank, step))).backward()
        sq(model(batch(rank, step, which=1))).backward()

    for step in range(3):
        before = digest(module)
        with ddp.no_sync():
            sq(ddp(batch(rank, step))).backward()
        assert digest(module) == before
        sq(ddp(batch(rank, step, which=1))).backward()
        reference.train(program, step)
        _assert_same(module, reference.module, f"step {step}")


def test_accumulation_with_optimizers_in_backward(ranks: RankPool) -> None:
    ranks(_accumulating, warnings_as_errors=False)


def _alone(rank: int, world: int) -> None:
    """With one rank torch's own hooks stay, and step at once."""
    import torch.distributed as dist

    groups = [dist.new_group([r]) for r in range(world)]
    module, reference = TwoLayers(), TwoLayers()
    ddp = DistributedDataParallel(module, process_group=groups[rank])
    _in_backward(module.parameters())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(2):
        plain(ddp, rank, step)
        plain(reference, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        _assert_same(module, reference, f"step {step}")


def test_one_rank(ranks: RankPool) -> None:
    ranks(_alone, warnings_as_errors=False)


# ----------------------------------------------------------------- _register_fused_optim


def _fused(rank: int, world: int, subset: bool) -> str:
    module = TwoLayers()
    ddp = DistributedDataParallel(module)
    chosen = list(module.b.parameters()) if subset else None
    ddp._register_fused_optim(torch.optim.AdamW, 0.1, optim_params=chosen, weight_decay=0.5, eps=1e-4)
    reference = OneProcess(TwoLayers(), world, adamw(0.1, 0.5))
    if subset:
        reference.optimizer = adamw(0.1, 0.5)(reference.module.b.parameters())
    for step in range(4):
        plain(ddp, rank, step)
        reference.run(plain, step)
        reference.optimizer.step()
        _assert_same(module, reference.module, f"step {step}")
        for p, q in zip(module.parameters(), reference.module.parameters(), strict=True):
            assert_near(p.grad, q.grad, f"step {step}")  # kept, as with torch's class
        ddp.zero_grad()
        reference.module.zero_grad()
    return digest(module)


@pytest.mark.parametrize("subset", [False, True])
def test_a_fused_optimizer(ranks: RankPool, subset: bool) -> None:
    first, second = ranks(_fused, subset)
    assert first == second


def _fused_misuse(rank: int, world: int) -> tuple[str, str]:
    ddp = DistributedDataParallel(TwoLayers())
    closure = raised(lambda: ddp._register_fused_optim(torch.optim.LBFGS, 0.1))
    ddp._register_fused_optim(torch.optim.SGD, 0.1)
    return closure, raised(lambda: ddp._register_fused_optim(torch.optim.SGD, 0.1))


def test_misuse_of_a_fused_optimizer(ranks: RankPool) -> None:
    for closure, second in ranks(_fused_misuse):
        assert closure.startswith("ValueError") and "does not have a functional counterpart" in closure
        assert second.startswith("RuntimeError") and "once" in second


def _fused_alone(rank: int, world: int) -> None:
    import torch.distributed as dist

    groups = [dist.new_group([r]) for r in range(world)]
    module, reference = TwoLayers(), TwoLayers()
    ddp = DistributedDataParallel(module, process_group=groups[rank])
    ddp._register_fused_optim(torch.optim.SGD, 0.5)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(2):
        ddp.zero_grad()
        optimizer.zero_grad()
        plain(ddp, rank, step)
        plain(reference, rank, step)
        optimizer.step()
        _assert_same(module, reference, f"step {step}")


def test_a_fused_optimizer_on_one_rank(ranks: RankPool) -> None:
    ranks(_fused_alone, warnings_as_errors=False)
