"""Communication hooks: the user's own reduction, and what happens when it goes wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import (
    Branches,
    OneProcess,
    TwoLayers,
    assert_equal_replicas,
    assert_same_gradients,
    bare_linear,
    batch,
    digest,
    impatient_group,
    ones_row,
    plain,
    raised,
    sgd,
    sq,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_localsgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.futures import Future

from gradsync import DistributedDataParallel
from rank_pool import RankPool

Hook = Callable[[Any, Any], Any]


def _done(value: torch.Tensor) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(value)
    return future


def _reduced(buffer: torch.Tensor) -> Future[torch.Tensor]:
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _sum(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    return _reduced(bucket.buffer())


def _halve_then_sum(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    return _reduced(bucket.buffer().div_(2))


def _nothing(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    return _done(bucket.buffer())


def _on_a_copy(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    return _reduced(bucket.buffer().clone() / 2).then(lambda future: future.value().clone())


def _with_another_buffer(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    bucket.set_buffer(bucket.buffer().clone() / 2)
    assert all(torch.equal(g, v) for g, v in zip(bucket.gradients(), _views(bucket), strict=True))
    return _reduced(bucket.buffer())


def _views(bucket: dist.GradBucket) -> list[torch.Tensor]:
    parts = bucket.buffer().split([p.numel() for p in bucket.parameters()])
    return [part.view(p.shape) for part, p in zip(parts, bucket.parameters(), strict=True)]


def _entries(rank: int, world: int, hook: Hook) -> list[float]:
    ddp = DistributedDataParallel(bare_linear())
    ddp.register_comm_hook(None, hook)
    seen = []
    for _ in range(3):
        ddp(ones_row(rank)).sum().backward()
        (entry,) = ddp.module.weight.grad.unique().tolist()
        seen.append(entry)
        ddp.zero_grad()
    return seen


@pytest.mark.parametrize(("hook", "expected"), [(_sum, [3.0, 3.0]), (_nothing, [1.0, 2.0])])
def test_the_hook_alone_decides_about_the_division(ranks: RankPool, hook: Hook, expected: list[float]) -> None:
    assert ranks(_entries, hook) == [[entry] * 3 for entry in expected]


def _hooked(
    rank: int, world: int, hook: Hook, state: Any, arguments: dict[str, Any], tolerance: float | None, program: Any
) -> str:
    ddp = DistributedDataParallel(TwoLayers() if program is plain else Branches(), **arguments)
    ddp.register_comm_hook(state() if callable(state) else state, hook)
    reference = OneProcess(TwoLayers() if program is plain else Branches(), world, sgd(0.25))
    optimizer = sgd(0.25)(ddp.parameters())
    for step in range(5):
        program(ddp, rank, step)
        reference.run(program, step)
        if tolerance is None:
            assert_same_gradients(ddp.module, reference.module, f"step {step}", exact=True)
        else:
            for p, q in zip(ddp.module.parameters(), reference.module.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance)
                p.grad.copy_(q.grad)  # so that errors of the compression do not add up over the steps
        optimizer.step()
        reference.optimizer.step()
        optimizer.zero_grad()
        reference.optimizer.zero_grad()
    return digest(ddp.module)


_BUCKETS = [{}, {"bucket_cap_mb": 1e-6}, {"gradient_as_bucket_view": True}]


@pytest.mark.parametrize("arguments", _BUCKETS)
@pytest.mark.parametrize("hook", [_halve_then_sum, _on_a_copy, _with_another_buffer, default_hooks.allreduce_hook])
def test_an_averaging_hook_equals_no_hook(ranks: RankPool, hook: Hook, arguments: dict[str, Any]) -> None:
    assert_equal_replicas(ranks(_hooked, hook, None, arguments, None, plain))


def _alternating(model: Any, rank: int, step: int) -> None:
    sq(model(batch(rank, step), ["abc", "a", "bc"][(step + rank) % 3])).backward()


@pytest.mark.parametrize("arguments", _BUCKETS)
def test_a_hook_with_branches_that_differ_per_rank(ranks: RankPool, arguments: dict[str, Any]) -> None:
    assert_equal_replicas(ranks(_hooked, _halve_then_sum, None, arguments, None, _alternating))


def _wrapped_in_fp16(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    wrapped: Hook = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    future: Future[torch.Tensor] = wrapped(state, bucket)
    return future


def _power_state() -> powersgd.PowerSGDState:
    return powersgd.PowerSGDState(None, matrix_approximation_rank=3, start_powerSGD_iter=2, min_compression_rate=0.1)


def _local_sgd_state() -> post_localsgd.PostLocalSGDState:
    return post_localsgd.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=3)


# What the compression loses: eleven bits of mantissa in float16, eight in bfloat16; a rank that is as large as the
# matrix loses nothing but rounding.
@pytest.mark.parametrize(
    ("hook", "state", "tolerance"),
    [
        (default_hooks.fp16_compress_hook, None, 2e-3),
        (default_hooks.bf16_compress_hook, None, 2e-2),
        (_wrapped_in_fp16, None, 2e-3),
        (powersgd.powerSGD_hook, _power_state, 1e-3),
        (post_localsgd.post_localSGD_hook, _local_sgd_state, 1e-6),
    ],
    ids=["fp16", "bf16", "fp16 wrapper", "powersgd", "post-local SGD"],
)
def test_torchs_own_hooks_run_unchanged(ranks: RankPool, hook: Hook, state: Any, tolerance: float) -> None:
    assert_equal_replicas(ranks(_hooked, hook, state, {}, tolerance, plain))


# ----------------------------------------------------------------- what a hook is given


def _buckets_seen(rank: int, world: int) -> list[tuple[int, bool, list[tuple[int, ...]]]]:
    ddp = DistributedDataParallel(TwoLayers(), bucket_cap_mb=1e-6)
    seen = []

    def hook(state: list[str], bucket: dist.GradBucket) -> Future[torch.Tensor]:
        assert state == ["mine"]
        assert bucket.buffer().dim() == 1
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.shape == parameter.shape
            assert gradient.data_ptr() >= bucket.buffer().data_ptr()
        assert bucket.buffer().numel() == sum(g.numel() for g in bucket.gradients())
        seen.append((bucket.index(), bucket.is_last(), [tuple(p.shape) for p in bucket.parameters()]))
        return _nothing(state, bucket)

    ddp.register_comm_hook(["mine"], hook)
    plain(ddp, rank, 0)
    return seen


def test_what_a_hook_is_given(ranks: RankPool) -> None:
    first, second = ranks(_buckets_seen)
    assert first == second
    assert [index for index, _, _ in first] == [0, 1, 2, 3]
    assert [is_last for _, is_last, _ in first] == [False, False, False, True]
    assert [shapes for _, _, shapes in first] == [[(2,)], [(2, 3)], [(3,)], [(3, 3)]]


# ----------------------------------------------------------------- going wrong


def _breaks_in_step_1(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(TwoLayers())
    calls = []

    def hook(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        calls.append(bucket.index())
        if len(calls) == 2:
            raise RuntimeError("hook broke 99")
        return _halve_then_sum(state, bucket)

    ddp.register_comm_hook(None, hook)
    plain(ddp, rank, 0)
    return raised(lambda: plain(ddp, rank, 1))


def test_an_exception_in_a_hook_comes_out_of_backward(ranks: RankPool) -> None:
    for text in ranks(_breaks_in_step_1):
        assert "hook broke 99" in text


def _future_that_fails(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(TwoLayers())

    def hook(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = Future()
        future.set_exception(ValueError("future broke 98"))
        return future

    ddp.register_comm_hook(None, hook)
    return raised(lambda: plain(ddp, rank, 0))


def test_a_hook_whose_future_fails(ranks: RankPool) -> None:
    for text in ranks(_future_that_fails):
        assert "future broke 98" in text


def _never_completes(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(TwoLayers(), process_group=impatient_group(world, 1.0))
    futures: list[Future[torch.Tensor]] = []

    def hook(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        futures.append(Future())
        return futures[-1]

    ddp.register_comm_hook(None, hook)
    return raised(lambda: plain(ddp, rank, 0))


def test_a_future_that_nobody_completes_times_out_with_the_names(ranks: RankPool) -> None:
    for text in ranks(_never_completes):
        assert "b.weight" in text


def _misuse(rank: int, world: int) -> list[str]:
    ddp = DistributedDataParallel(TwoLayers())
    texts = [raised(lambda: ddp.register_comm_hook(None, "no function"))]  # type: ignore[arg-type]
    texts.append(raised(lambda: ddp.register_comm_hook(None, lambda state: state)))  # type: ignore[arg-type,misc]
    ddp.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    texts.append(raised(lambda: ddp.register_comm_hook(None, _sum)))
    texts.append(raised(lambda: plain(ddp, rank, 0)))
    return texts


def test_misuse_of_register_comm_hook(ranks: RankPool) -> None:
    for not_callable, wrong_arguments, second, no_future in ranks(_misuse):
        assert not_callable.startswith("TypeError")
        assert "callable" in not_callable
        assert wrong_arguments.startswith("ValueError")
        assert second.startswith("RuntimeError")
        assert "once" in second
        assert "Future" in no_future
