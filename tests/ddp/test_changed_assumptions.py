"""Programs that change what the engine takes for granted: where gradients lie, what is wrapped, who shares what."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import (
    OneProcess,
    TwoLayers,
    assert_near,
    assert_same_gradients,
    batch,
    in_quarters,
    plain,
    raised,
    sgd,
    sq,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from gradsync import DistributedDataParallel
from rank_pool import RankPool


def _train(ddp: Any, reference: OneProcess, rank: int, steps: int, program: Any = plain, start: int = 0) -> None:
    """Train both with new optimizers and compare the gradients of every step."""
    optimizer = sgd()(ddp.parameters())
    reference.optimizer = sgd()(reference.module.parameters())
    for step in range(start, start + steps):
        for each in (optimizer, reference.optimizer):
            each.zero_grad()
        program(ddp, rank, step)
        reference.run(program, step)
        assert_same_gradients(ddp.module, reference.module, f"step {step}:")
        for each in (optimizer, reference.optimizer):
            each.step()


def _pair(world: int, **arguments: Any) -> tuple[Any, OneProcess]:
    return DistributedDataParallel(TwoLayers(), **arguments), OneProcess(TwoLayers(), world)


# ----------------------------------------------------------------- gradients and parameters that move


def _moved_gradients(rank: int, world: int, set_to_none: bool) -> None:
    ddp, reference = _pair(world)
    for step in range(4):
        plain(ddp, rank, step)
        reference.run(plain, step)
        assert_same_gradients(ddp.module, reference.module, f"step {step}:")
        for p in [*ddp.parameters(), *reference.module.parameters()]:
            p.grad.data = p.grad.data / 2
        for module in (ddp, reference.module):
            if step % 2:
                module.zero_grad(set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_assigned_through_data(ranks: RankPool, set_to_none: bool) -> None:
    ranks(_moved_gradients, set_to_none)


def _in_double(model: nn.Module, rank: int, step: int) -> None:
    sq(model(batch(rank, step).double())).backward()


def _another_dtype(rank: int, world: int, trained: int) -> None:
    ddp, reference = _pair(world)
    _train(ddp, reference, rank, trained)
    ddp.double()
    reference.module.double()
    _train(ddp, reference, rank, 3, _in_double, start=trained)


@pytest.mark.parametrize("trained", [0, 3])
def test_another_dtype_after_wrapping(ranks: RankPool, trained: int) -> None:
    ranks(_another_dtype, trained)


def _another_dtype_on_one_rank(rank: int, world: int) -> str:
    ddp, reference = _pair(world)
    if rank == 1:
        ddp.double()
    text = raised(lambda: (_in_double if rank == 1 else plain)(ddp, rank, 0))
    ddp.float()
    ddp.zero_grad()
    _train(ddp, reference, rank, 3)
    return text


def test_another_dtype_on_one_rank_is_told_on_all(ranks: RankPool) -> None:
    for text in ranks(_another_dtype_on_one_rank):
        assert "ContractError" in text
        assert "float64 on rank 1" in text


def _grown(rank: int, world: int) -> None:
    ddp, reference = _pair(world)
    _train(ddp, reference, rank, 2)
    for module in (ddp.module, reference.module):
        module.zero_grad()
        module.b.weight.data = torch.cat([module.b.weight.data, torch.ones(1, 3)])
        module.b.bias.data = torch.cat([module.b.bias.data, torch.ones(1)])
    _train(ddp, reference, rank, 3, start=2)


def test_a_parameter_that_grows_in_place(ranks: RankPool) -> None:
    ranks(_grown)


# ----------------------------------------------------------------- what the wrapper holds


class _Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.adapter = in_quarters(nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.base(x))


def _another_module(rank: int, world: int) -> None:
    ddp, reference = _pair(world)
    _train(ddp, reference, rank, 2)
    ddp.zero_grad()
    ddp.module, reference.module = _Adapted(ddp.module), _Adapted(reference.module)
    _train(ddp, reference, rank, 3, start=2)


def test_another_module_put_into_the_wrapper(ranks: RankPool) -> None:
    ranks(_another_module)


def _temporary(rank: int, world: int) -> None:
    module, reference = TwoLayers(), OneProcess(TwoLayers(), world)
    loss = sq(DistributedDataParallel(module)(batch(rank, 0)))
    loss.backward()
    reference.run(plain, 0)
    assert_same_gradients(module, reference.module)


def test_a_wrapper_that_is_gone_before_backward(ranks: RankPool) -> None:
    ranks(_temporary)


def _wrapped_often(rank: int, world: int) -> int:
    module = TwoLayers()
    for step in range(5):
        plain(DistributedDataParallel(module), rank, step)
    return len(module.a.weight._post_accumulate_grad_hooks)


def test_wrappers_that_are_gone_leave_no_hooks(ranks: RankPool) -> None:
    assert ranks(_wrapped_often) == [0, 0]


# ----------------------------------------------------------------- several engines in one backward


def _copy_in_the_same_backward(rank: int, world: int) -> None:
    """The ranks reach the two models in another order, and all buckets have one size."""
    module = in_quarters(nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3))))
    first = DistributedDataParallel(module, bucket_cap_mb=1e-6)
    second = copy.deepcopy(first)
    reference = OneProcess(copy.deepcopy(module), world)
    for step in range(4):
        for m in (first, second, reference.module):
            m.zero_grad()
        models = [(first, 1.0), (second, 4.0)][:: 1 if rank == 0 else -1]
        losses = [scale * sq(model(batch(rank, step))) for model, scale in models]
        (losses[0] + losses[1]).backward()
        reference.run(plain, step)
        for model, scale in models:
            for p, expected in zip(model.parameters(), reference.module.parameters(), strict=True):
                assert_near(p.grad / scale, expected.grad, f"step {step}, model of {scale}")


def test_a_deep_copy_in_the_same_backward(ranks: RankPool) -> None:
    ranks(_copy_in_the_same_backward)


def _first_of_two_refused(rank: int, world: int) -> str:
    models = [DistributedDataParallel(TwoLayers()) for _ in range(2)]

    def step(number: int) -> None:
        for m in models:
            m.zero_grad()
        (sq(models[0](batch(rank, number))) + sq(models[1](batch(rank, number)))).backward()

    step(0)
    models[0].module.a.weight.requires_grad_(rank == 0)
    text = raised(lambda: step(1))
    models[0].module.a.weight.requires_grad_(True)
    for number in (2, 3):
        step(number)
    return text


def test_an_error_of_one_wrapper_leaves_the_other_in_step(ranks: RankPool) -> None:
    assert all("no longer train the same parameters" in text for text in ranks(_first_of_two_refused))


# ----------------------------------------------------------------- hooks of the user


def _double_gradient(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(2)


def _doubling(rank: int, world: int) -> None:
    ddp, reference = _pair(world, bucket_cap_mb=1e-6)
    for p in ddp.parameters():
        p.register_post_accumulate_grad_hook(_double_gradient)
    for step in range(3):
        for module in (ddp, reference.module):
            module.zero_grad()
        plain(ddp, rank, step)
        reference.run(plain, step)
        for p, expected in zip(ddp.parameters(), reference.module.parameters(), strict=True):
            assert_near(p.grad, 2 * expected.grad, f"step {step}")


def test_a_hook_set_after_wrapping_changes_the_gradient_before_it_is_reduced(ranks: RankPool) -> None:
    ranks(_doubling)


def _stepping(rank: int, world: int, before: bool) -> str:
    module = TwoLayers()
    ddp = None if before else DistributedDataParallel(module)
    optimizer = sgd()(module.parameters())

    def step(_: torch.Tensor) -> None:
        optimizer.step()

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(step)
    model = ddp or DistributedDataParallel(module)
    return raised(lambda: plain(model, rank, 0))


@pytest.mark.parametrize("before", [True, False])
def test_an_optimizer_that_steps_in_the_middle_of_backward_is_told(ranks: RankPool, before: bool) -> None:
    assert all("optimizer.step() in the middle of backward" in text for text in ranks(_stepping, before))


# ----------------------------------------------------------------- arguments and dtypes


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"process_group": "world"}, "TypeError: process_group is a torch.distributed.ProcessGroup"),
        ({"device_mesh": 3}, "TypeError: device_mesh is"),
        ({"device_ids": 0}, "TypeError: device_ids is a list"),
        ({"bucket_cap_mb_list": 5}, "TypeError: bucket_cap_mb_list is a list"),
        ({"mixed_precision": "fp16"}, "TypeError: mixed_precision is"),
        ({"forward_sync_buffers": "yes"}, "TypeError: forward_sync_buffers"),
    ],
)
def test_arguments_of_another_kind(ranks: RankPool, arguments: dict[str, Any], fragment: str) -> None:
    assert all(fragment in text for text in ranks(_wrap, arguments))


def _wrap(rank: int, world: int, arguments: dict[str, Any]) -> str:
    return raised(lambda: DistributedDataParallel(TwoLayers(), **arguments))


def _wrong_on_one_rank(rank: int, world: int, arguments: dict[str, Any]) -> str:
    return raised(lambda: DistributedDataParallel(TwoLayers(), **(arguments if rank else {})))


def test_arguments_of_another_kind_on_one_rank(ranks: RankPool) -> None:
    for arguments in ({"device_ids": 0}, {"bucket_cap_mb_list": 5}, {"mixed_precision": "fp16"}):
        assert all("ContractError" in text for text in ranks(_wrong_on_one_rank, arguments))


def _sparse_buffer(rank: int, world: int, differs: bool) -> str:
    module = TwoLayers()
    module.register_buffer("adjacency", (torch.eye(3) * (1 + rank * differs)).to_sparse())

    def train() -> None:
        sq(DistributedDataParallel(module)(batch(rank, 0))).backward()

    if differs:
        return raised(train)
    train()
    return ""


def test_sparse_buffers_stay_as_they_are_and_must_be_equal(ranks: RankPool) -> None:
    assert ranks(_sparse_buffer, False) == ["", ""]
    assert all("sparse buffer 'adjacency'" in text for text in ranks(_sparse_buffer, True))


def _layer_on_the_wrapper(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 3))
    torch.manual_seed(0)
    ddp.head = nn.Linear(3, 2)
    for step in range(3):
        ddp.zero_grad()
        sq(ddp.head(ddp(batch(rank, step)))).backward()
        gradients = [ddp.head.weight.grad.clone() for _ in range(world)]
        dist.all_gather(gradients, ddp.head.weight.grad)
        assert torch.equal(gradients[0], gradients[-1])


def test_a_layer_registered_on_the_wrapper_is_synchronised(ranks: RankPool) -> None:
    ranks(_layer_on_the_wrapper)


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _buffer_resized_on_one_rank(rank: int, world: int) -> list[int]:
    ddp = DistributedDataParallel(Cache())
    sizes = []
    for step in range(3):
        if rank == step % 2:
            ddp.module.seen = torch.full((2 + step,), float(rank))
        sq(ddp(batch(rank, step))).backward()
        sizes.append(ddp.module.seen.numel())
    return sizes


def test_a_buffer_resized_on_one_rank_between_passes_is_rank_0s_again(ranks: RankPool) -> None:
    assert ranks(_buffer_resized_on_one_rank) == [[2, 2, 4], [2, 2, 4]]


def _hook_on_one_rank(rank: int, world: int, trained: int) -> str:
    ddp = DistributedDataParallel(TwoLayers())
    for step in range(trained):
        sq(ddp(batch(rank, step))).backward()

    def register_and_train() -> None:
        if rank == 0 or trained:
            ddp.register_comm_hook(dist.group.WORLD, allreduce_hook if rank == 0 else fp16_compress_hook)
        sq(ddp(batch(rank, 9))).backward()

    return raised(register_and_train)


@pytest.mark.parametrize("trained", [0, 2])
def test_different_hooks_are_told_on_all_ranks(ranks: RankPool, trained: int) -> None:
    assert all("different communication hooks" in text for text in ranks(_hook_on_one_rank, trained))


def _half_by_default(rank: int, world: int) -> None:
    torch.set_default_dtype(torch.float16)
    try:
        ddp = DistributedDataParallel(nn.Linear(3, 2))
        for step in range(2):
            sq(ddp(batch(rank, step).half())).backward()
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_dtype_does_not_matter(ranks: RankPool) -> None:
    ranks(_half_by_default)
