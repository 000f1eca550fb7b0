"""Ready-made communication hooks: gradsync's own, torch's built-in ones, and torch's collection, run as they are."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from reference import (
    OneProcess,
    TwoLayers,
    assert_equal_replicas,
    assert_near,
    digest,
    plain,
    raised,
    sgd,
)
from torch import nn

import gradsync
from gradsync import DistributedDataParallel
from rank_pool import RankPool

Register = Callable[[DistributedDataParallel], object]


def _fp16(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, gradsync.fp16_compress_hook)


def _bf16(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(dist.new_group(), gradsync.bf16_compress_hook)


def _builtin_allreduce(ddp: DistributedDataParallel) -> None:
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def _builtin_fp16(ddp: DistributedDataParallel) -> None:
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def _collected(name: str, **arguments: Any) -> Register:
    def register(ddp: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook

        register_ddp_comm_hook(DDPCommHookType[name], ddp, **arguments)

    return register


def _wrapped_bf16(ddp: DistributedDataParallel) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    ddp.register_comm_hook(None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook))


_HOOKS: dict[str, tuple[Register, float]] = {
    # what float16 (11 bits) and bfloat16 (8 bits) lose; torch's 8-bit hooks fail with gloo, in torch's own class too,
    # and its batched PowerSGD fails everywhere (torch 2.13)
    "fp16": (_fp16, 2e-3),
    "bf16": (_bf16, 2e-2),
    "built-in allreduce": (_builtin_allreduce, 0.0),
    "built-in fp16": (_builtin_fp16, 2e-3),
    "torch's allreduce": (_collected("ALLREDUCE", state=None), 1e-6),
    "torch's fp16": (_collected("FP16_COMPRESS", state=None), 2e-3),
    "torch's bf16": (_collected("BF16_COMPRESS", state=None), 2e-2),
    "torch's bf16 wrapper": (_wrapped_bf16, 2e-2),
}


def _averages(rank: int, world: int, name: str, arguments: dict[str, Any]) -> str:
    register, tolerance = _HOOKS[name]
    ddp = DistributedDataParallel(TwoLayers(), **arguments)
    register(ddp)
    reference = OneProcess(TwoLayers(), world)
    for step in range(4):
        plain(ddp, rank, step)
        reference.run(plain, step)
        largest = max(p.grad.abs().max().item() for p in reference.module.parameters() if p.grad is not None)
        for p, q in zip(ddp.module.parameters(), reference.module.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance * largest + 1e-6)
        ddp.zero_grad()
        reference.module.zero_grad()
    assert "once" in raised(lambda: ddp.register_comm_hook(None, gradsync.fp16_compress_hook))
    assert "once" in raised(lambda: _builtin_allreduce(ddp))
    assert "once" in raised(lambda: ddp._register_fused_optim(torch.optim.SGD, 0.1))
    return digest(ddp.module)


@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb": 1e-6}])
@pytest.mark.parametrize("name", _HOOKS)
def test_hooks_average(ranks: RankPool, name: str, arguments: dict[str, Any]) -> None:
    # importing torch's collection warns of something deprecated
    assert_equal_replicas(ranks(_averages, name, arguments, warnings_as_errors=False))


def _large(rank: int, world: int) -> float:
    """The average of 40000 fits into float16, the sum does not."""
    layer = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(layer)
    _fp16(ddp)
    ddp(torch.full((1, 1), 40000.0)).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.item()


def test_fp16_divides_before_it_casts(ranks: RankPool) -> None:
    assert ranks(_large) == [40000.0, 40000.0]


def _on_a_subgroup(rank: int, world: int) -> float:
    """The group given as state is the one that is averaged over."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    layer = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(layer)
    ddp.register_comm_hook(alone, gradsync.fp16_compress_hook)
    ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.item()


def test_the_state_is_the_group(ranks: RankPool) -> None:
    assert ranks(_on_a_subgroup) == [1.0, 2.0]


def _not_a_kind(rank: int, world: int) -> str:
    return raised(lambda: DistributedDataParallel(TwoLayers())._register_builtin_comm_hook("ALLREDUCE"))


def test_a_built_in_hook_is_named_by_torchs_enumeration(ranks: RankPool) -> None:
    for text in ranks(_not_a_kind):
        assert text.startswith("TypeError") and "BuiltinCommHookType" in text


def _idle(rank: int, world: int) -> float:
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks

    layer = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(layer)
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.item()


def test_the_hook_for_debugging_leaves_gradients_local(ranks: RankPool) -> None:
    assert ranks(_idle) == [1.0, 2.0]


# ----------------------------------------------------------------- hooks that leave the collective to the reducer


def _torchs_optimizer_hook(rank: int, world: int) -> None:
    """torch's own hook for optimizers in backward asks the reducer to sum, divides and steps."""
    import weakref

    from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _apply_optim_in_backward_hook

    ddp, reference = DistributedDataParallel(TwoLayers()), OneProcess(TwoLayers(), world, sgd(0.5))
    for p in ddp.parameters():
        p._in_backward_optimizers = [torch.optim.SGD([p], lr=0.25), torch.optim.SGD([p], lr=0.25)]
    hook = _apply_optim_in_backward_hook(gradient_is_bucket_view=False)
    ddp._in_backward.refresh = lambda _: None  # the hook alone is to step
    ddp.register_comm_hook(weakref.ref(ddp), hook)
    for step in range(3):
        with mock.patch.object(torch.accelerator, "current_stream"):  # which there is none of
            plain(ddp, rank, step)
        reference.train(plain, step)
        for p, q in zip(ddp.module.parameters(), reference.module.parameters(), strict=True):
            assert_near(p, q, f"step {step}")


def test_torchs_hook_for_optimizers_in_backward(ranks: RankPool) -> None:
    ranks(_torchs_optimizer_hook, warnings_as_errors=False)


def _torchs_overlap_hook(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
        _hook_then_optimizer,
        _OptimizerHookState,
    )
    from torch.distributed.optim import as_functional_optim

    ddp, reference = DistributedDataParallel(TwoLayers()), OneProcess(TwoLayers(), world, sgd(0.5))
    state = _OptimizerHookState(as_functional_optim(torch.optim.SGD, 0.5))
    ddp.register_comm_hook(None, _hook_then_optimizer(allreduce_hook, state))
    for step in range(3):
        plain(ddp, rank, step)
        ddp.zero_grad()
        reference.train(plain, step)
        for p, q in zip(ddp.module.parameters(), reference.module.parameters(), strict=True):
            assert_near(p, q, f"step {step}")


def test_torchs_hook_then_optimizer(ranks: RankPool) -> None:
    ranks(_torchs_overlap_hook, warnings_as_errors=False)


# ----------------------------------------------------------------- companions: sharded optimizer, local SGD


def _overlapped_zero(rank: int, world: int) -> None:
    """torch's ZeroRedundancyOptimizer, whose step runs inside torch's hook once the buckets are final."""
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = TwoLayers()
    ddp = DistributedDataParallel(module, bucket_cap_mb=1e-6)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.5)
    with mock.patch.object(dist, "get_backend"):  # torch refuses gloo
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero, shard_buckets=True))
    before = copy.deepcopy(module.state_dict())
    for step in range(2):  # the two steps in which torch learns the buckets, and does not train
        ddp.zero_grad()
        plain(ddp, rank, step)
    torch.testing.assert_close(module.state_dict(), before)
    reference = OneProcess(TwoLayers(), world, sgd(0.5))
    for step in range(2, 5):
        ddp.zero_grad()
        plain(ddp, rank, step)
        reference.train(plain, step)
        for p, q in zip(module.parameters(), reference.module.parameters(), strict=True):
            assert_near(p, q, f"step {step}")


def test_zero_overlapped_with_backward(ranks: RankPool) -> None:
    ranks(_overlapped_zero, warnings_as_errors=False)


def _local_sgd(rank: int, world: int) -> str:
    """Gradients averaged for two steps, local after that, parameters averaged every second step."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    alone = [dist.new_group([r]) for r in range(world)][rank]
    ddp = DistributedDataParallel(TwoLayers())
    ddp.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=2), post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(ddp.parameters(), lr=0.5), PeriodicModelAverager(period=2, warmup_steps=2)
    )
    digests = []
    for step in range(6):
        ddp.zero_grad()
        plain(ddp, rank, step)
        optimizer.step()
        digests.append(digest(ddp.module))
    return " ".join(digests)


def test_local_sgd_with_its_averager(ranks: RankPool) -> None:
    first, second = (text.split() for text in ranks(_local_sgd, warnings_as_errors=False))
    agree = [a == b for a, b in zip(first, second, strict=True)]
    assert agree[:2] == [True, True]
    assert sum(agree[2:]) == 2 and not all(agree)


# ----------------------------------------------------------------- gradients outside of the planned buckets


def _unfrozen(rank: int, world: int, with_hook: bool, arguments: dict[str, Any]) -> list[float]:
    """A parameter that is unfrozen is reduced in a collective of its own for one pass: by the same rule."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for p in model.parameters():
        nn.init.ones_(p)
    model[1].weight.requires_grad_(False)
    ddp = DistributedDataParallel(model, **arguments)
    if with_hook:
        ddp.register_comm_hook(None, gradsync.fp16_compress_hook)
    found = []
    for step in range(3):
        model[1].weight.requires_grad_(step > 0)
        ddp.zero_grad()
        if arguments:
            ddp.add_gradient_weight(2.0)
        ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
        found.append(model[0].weight.grad.item())
        if step:
            found.append(model[1].weight.grad.item())
    return found


@pytest.mark.parametrize(
    ("with_hook", "arguments", "expected"),
    [(False, {}, 1.5), (True, {}, 1.5), (False, {"reduction": "weighted"}, 0.75)],
)
def test_an_unfrozen_parameter_is_reduced_by_the_same_rule(
    ranks: RankPool, with_hook: bool, arguments: dict[str, Any], expected: float
) -> None:
    assert ranks(_unfrozen, with_hook, arguments) == [[expected] * 5] * 2


def _sparse_beside_a_hook(rank: int, world: int) -> tuple[float, float]:
    model = nn.Sequential(nn.EmbeddingBag(2, 1, mode="sum", sparse=True), nn.Linear(1, 1, bias=False))
    for p in model.parameters():
        nn.init.ones_(p)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, gradsync.bf16_compress_hook)
    ddp(torch.tensor([[0] * (rank + 1)])).sum().backward()
    return model[0].weight.grad.to_dense()[0, 0].item(), model[1].weight.grad.item()


def test_sparse_gradients_beside_a_hook_are_averaged(ranks: RankPool) -> None:
    assert ranks(_sparse_beside_a_hook) == [(1.5, 1.5)] * 2
