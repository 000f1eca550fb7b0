"""The sharded optimizer trains as a plain one does: the same parameters, step by step, whatever the program."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from random_programs import Program, train
from reference import (
    Branches,
    OneProcess,
    TwoLayers,
    assert_equal_replicas,
    assert_near,
    batch,
    digest,
    in_quarters,
    plain,
    raised,
    sq,
    unsynced,
)
from test_random_programs import _programs, _settings
from torch import nn
from torch.distributed.algorithms.join import Join

from gradsync import DistributedDataParallel, ZeroRedundancyOptimizer, plain_optimizer_state
from gradsync.ddp import exchange, sharding
from gradsync.ddp.sharded_gradient import ShardedGradient
from gradsync.errors import ConfigError, ContractError
from rank_pool import RankPool

# A large eps keeps rounding noise in gradients that are zero in theory from becoming whole steps.
_ADAMW = (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.3, "eps": 1e-4})
_MOMENTUM = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1})


class Uneven(nn.Module):
    """Layers of odd sizes, so that slices end inside of parameters; the middle one has a bucket of its own."""

    def __init__(self, width: int = 370) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.middle = nn.Linear(width, width + 1)
        self.last = nn.Linear(width + 1, 2)
        with torch.no_grad():
            for p in self.parameters():
                values = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
                p.copy_(values / max(p.shape[-1], 1) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def _in_two_groups(module: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in module.parameters() if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.5},
        {"params": [p for p in module.parameters() if p.dim() <= 1], "lr": 0.01},
    ]


def _pair(
    world: int,
    build: Callable[[], nn.Module] = TwoLayers,
    optimizer: tuple[Any, dict[str, Any]] = _ADAMW,
    groups: Callable[[nn.Module], Any] = lambda module: list(module.parameters()),
    **arguments: Any,
) -> tuple[Any, Any, OneProcess]:
    """A wrapped module with a sharded optimizer, and the same in one process with a plain one."""
    optimizer_class, options = optimizer
    ddp = DistributedDataParallel(build(), **arguments)
    sharded = ZeroRedundancyOptimizer(groups(ddp.module), optimizer_class, ddp=ddp, **options)
    reference = OneProcess(build(), world)
    reference.optimizer = optimizer_class(groups(reference.module), **options)
    return ddp, sharded, reference


def _assert_alike(ddp: Any, reference: OneProcess, when: str) -> None:
    for (name, p), q in zip(ddp.module.named_parameters(), reference.module.parameters(), strict=True):
        assert_near(p, q, f"{when}: {name}", rtol=1e-4)


def _train_alike(
    rank: int,
    world: int,
    program: Any = plain,
    steps: int = 20,
    max_norm: float | None = None,
    has_schedule: bool = False,
    divisor: float | None = None,
    **how: Any,
) -> str:
    ddp, sharded, reference = _pair(world, **how)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step / 4))
        for each in (sharded, reference.optimizer)
        if has_schedule
    ]
    for step in range(steps):
        program(ddp, rank, step)
        reference.run(program, step, divisor)
        if max_norm is not None:
            norm = sharded.clip_grad_norm_(max_norm)
            assert_near(norm, nn.utils.clip_grad_norm_(reference.module.parameters(), max_norm), f"step {step}: norm")
        for each in (sharded, reference.optimizer, *schedules):
            each.step()
        _assert_alike(ddp, reference, f"after step {step}")
        for each in (sharded, reference.optimizer):
            each.zero_grad()
    ddp.verify_replicas()
    return digest(ddp.module)


# ----------------------------------------------------------------- parity


@pytest.mark.parametrize(
    "optimizer",
    [
        (torch.optim.SGD, {"lr": 0.05}),
        _MOMENTUM,
        _ADAMW,
        (torch.optim.AdamW, {**_ADAMW[1], "fused": True}),
        (torch.optim.AdamW, {**_ADAMW[1], "foreach": True, "amsgrad": True}),
        (torch.optim.Adam, {"lr": 0.02, "eps": 1e-4}),
        (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-2, "momentum": 0.5}),
        (torch.optim.Adagrad, {"lr": 0.02, "eps": 1e-4}),
    ],
    ids=["sgd", "momentum", "adamw", "adamw-fused", "amsgrad", "adam", "rmsprop", "adagrad"],
)
def test_twenty_steps_of_two_ranks(ranks: RankPool, optimizer: Any) -> None:
    assert_equal_replicas(ranks(_train_alike, build=Uneven, optimizer=optimizer))


@pytest.mark.parametrize("optimizer", [_MOMENTUM, _ADAMW])
def test_twenty_steps_of_three_ranks(ranks3: RankPool, optimizer: Any) -> None:
    assert_equal_replicas(ranks3(_train_alike, build=partial(Uneven, 401), optimizer=optimizer))


def test_groups_schedule_and_clipping_together(ranks3: RankPool) -> None:
    how = {"build": Uneven, "groups": _in_two_groups, "max_norm": 0.2, "has_schedule": True}
    assert_equal_replicas(ranks3(_train_alike, **how))


@pytest.mark.parametrize("cap", [1e-6, 0.001, None])
def test_any_size_of_buckets(ranks: RankPool, cap: float | None) -> None:
    assert_equal_replicas(ranks(_train_alike, steps=4, bucket_cap_mb=cap, groups=_in_two_groups))


@pytest.mark.parametrize("reduction", ["sum", "weighted"])
def test_other_reductions(ranks: RankPool, reduction: str) -> None:
    assert_equal_replicas(ranks(_other_reduction, reduction))


def _other_reduction(rank: int, world: int, reduction: str) -> str:
    def program(model: Any, rank: int, step: int) -> None:
        if reduction == "weighted" and isinstance(model, nn.parallel.DistributedDataParallel):
            model.add_gradient_weight(rank + 1)
        plain(model, rank, step)

    divisor = 1.0 if reduction == "sum" else world * (world + 1) / 2
    return _train_alike(rank, world, program, 6, divisor=divisor, optimizer=_MOMENTUM, reduction=reduction)


@pytest.mark.parametrize("way", [exchange.NativeExchange, exchange.AllReduceExchange, exchange.PairwiseExchange])
def test_every_way_to_exchange_slices(ranks3: RankPool, way: Any) -> None:
    assert_equal_replicas(ranks3(_with_exchange, way))


def _with_exchange(rank: int, world: int, way: Any) -> str:
    chosen = sharding.choose_exchange
    sharding.choose_exchange = lambda group, device: way(group)
    try:
        return _train_alike(rank, world, build=Uneven, steps=4)
    finally:
        sharding.choose_exchange = chosen


def test_on_shared_memory(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_on_shared_memory))


def _on_shared_memory(rank: int, world: int) -> str:
    from gradsync.comm import shm

    shm.register()
    group = dist.new_group(backend="shm")
    result = _train_alike(rank, world, build=Uneven, steps=6, process_group=group)
    dist.destroy_process_group(group)
    return result


@hypothesis_settings(_settings, max_examples=120)
@given(program=_programs(world=2))
def test_random_programs(ranks: RankPool, program: Program) -> None:
    if program.stem != "sparse tokens":
        assert_equal_replicas(ranks(train, program, is_sharded=True))


@hypothesis_settings(_settings, max_examples=15)
@given(program=_programs(world=3))
def test_random_programs_of_three_ranks(ranks3: RankPool, program: Program) -> None:
    if program.stem != "sparse tokens":
        assert_equal_replicas(ranks3(train, program, is_sharded=True))


def test_one_rank_alone(ranks: RankPool) -> None:
    ranks(_alone)


def _alone(rank: int, world: int) -> None:
    mine = [dist.new_group([r]) for r in range(world)][rank]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the group is alone is what is wanted here
        ddp, sharded, reference = _pair(1, groups=_in_two_groups, process_group=mine)
    for step in range(5):
        plain(ddp, 0, step)
        reference.run(plain, step)
        norm = sharded.clip_grad_norm_(0.5)
        assert_near(norm, nn.utils.clip_grad_norm_(reference.module.parameters(), 0.5), "norm")
        for each in (sharded, reference.optimizer):
            each.step()
            each.zero_grad()
        _assert_alike(ddp, reference, f"step {step}")
    assert sharded.state_dict()["state"]["a.weight"]["exp_avg"].shape == (3, 3)


# ----------------------------------------------------------------- what a step finds


def _used_at_times(model: nn.Module, rank: int, step: int) -> None:
    """c is never used, b by rank 0 in even steps: neither decay nor momentum moves what no rank has used."""
    sq(model(batch(rank, step), "ab" if rank == 0 and step % 2 == 0 else "a")).backward()


@pytest.mark.parametrize("optimizer", [_MOMENTUM, _ADAMW])
def test_unused_parameters_stay(ranks: RankPool, optimizer: Any) -> None:
    digests = ranks(_train_alike, program=_used_at_times, build=Branches, optimizer=optimizer, steps=6)
    assert_equal_replicas(digests)


class Kinds(nn.Module):
    """Parameters of several dtypes, a scalar, an empty one, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(3, 50)
        self.double = nn.Linear(3, 50).double()
        self.half = nn.Parameter(torch.full((50,), 0.5, dtype=torch.bfloat16))
        self.complex = nn.Parameter(torch.full((50,), 1 + 2j))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.arange(150.0).view(3, 50).t() / 100)
        in_quarters(self.single)
        in_quarters(self.double)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.single(x) * self.scalar + self.double(x.double()).float() + x @ self.turned.t()
        return y * self.half.float() + (y * self.complex).imag + self.empty.sum()


def test_mixed_dtypes(ranks3: RankPool) -> None:
    assert_equal_replicas(ranks3(_mixed_dtypes))


def _mixed_dtypes(rank: int, world: int) -> str:
    ddp, sharded, reference = _pair(world, Kinds, (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}))
    for step in range(6):
        plain(ddp, rank, step)
        reference.run(plain, step)
        for each in (sharded, reference.optimizer):
            each.step()
            each.zero_grad()
        for (name, p), q in zip(ddp.module.named_parameters(), reference.module.parameters(), strict=True):
            assert p.stride() == q.stride()
            rtol = 2e-2 if p.dtype == torch.bfloat16 else 1e-4
            assert_near(torch.view_as_real(p) if p.is_complex() else p, _real(q), f"step {step}: {name}", rtol=rtol)
    saved = sharded.state_dict()
    restored = torch.optim.AdamW(reference.module.parameters(), lr=0.01, eps=1e-3)
    restored.load_state_dict(plain_optimizer_state(saved, restored, reference.module))
    for name, p in reference.module.named_parameters():
        want = reference.optimizer.state[p]
        assert restored.state[p]["exp_avg"].dtype == want["exp_avg"].dtype
        assert_near(_real(restored.state[p]["exp_avg"]), _real(want["exp_avg"]), name, rtol=2e-2)
    return digest(ddp.module)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _accumulating(model: nn.Module, rank: int, step: int) -> None:
    for which in range(2):
        with unsynced(model):
            sq(model(batch(rank, step, which=which))).backward()
    plain(model, rank, step)


def _several_backwards(model: nn.Module, rank: int, step: int) -> None:
    for which in range(3):
        sq(model(batch(rank, step, which=which))).backward()


def _both(model: nn.Module, rank: int, step: int) -> None:
    plain(model, rank, step)
    _accumulating(model, rank, step)


@pytest.mark.parametrize("program", [_accumulating, _several_backwards, _both])
def test_accumulation(ranks: RankPool, program: Any) -> None:
    assert_equal_replicas(ranks(_train_alike, program=program, steps=5))


def _clear_by_optimizer(sharded: Any, _model: nn.Module, step: int) -> None:
    sharded.zero_grad(set_to_none=step % 2 == 0)


def _clear_by_module(_sharded: Any, model: nn.Module, step: int) -> None:
    model.zero_grad(set_to_none=step % 2 == 0)


def _clear_one(_sharded: Any, model: nn.Module, _step: int) -> None:
    next(iter(model.parameters())).grad = None


def _scale(_sharded: Any, model: nn.Module, _step: int) -> None:
    for p in model.parameters():
        p.grad.mul_(0.5)
        p.grad /= 2


def _never(_sharded: Any, _model: nn.Module, _step: int) -> None:
    """Gradients of all steps add up."""


@pytest.mark.parametrize("clear", [_clear_by_optimizer, _clear_by_module, _clear_one, _scale, _never])
@pytest.mark.parametrize("program", [plain, _used_at_times])
def test_ways_to_clear_gradients(ranks: RankPool, clear: Any, program: Any) -> None:
    assert_equal_replicas(ranks(_cleared, clear, program))


def _cleared(rank: int, world: int, clear: Any, program: Any) -> str:
    build = TwoLayers if program is plain else Branches
    ddp, sharded, reference = _pair(world, build, _MOMENTUM)
    for step in range(5):
        program(ddp, rank, step)
        reference.run(program, step)
        for each, module in ((sharded, ddp), (reference.optimizer, reference.module)):
            each.step()
            with contextlib.suppress(AttributeError):  # a parameter without a gradient
                clear(each, module, step)
        _assert_alike(ddp, reference, f"step {step}")
    return digest(ddp.module)


def test_a_program_that_fires_more_often_than_learned(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_train_alike, program=_reentrant_later, build=Uneven, steps=6, optimizer=_MOMENTUM))


def _reentrant_later(model: nn.Module, rank: int, step: int) -> None:
    """From step 3 on rank 1 goes through a reentrant checkpoint twice, so that gradients arrive late."""
    from torch.utils.checkpoint import checkpoint

    x = batch(rank, step).requires_grad_()
    outputs = [model(x)]
    if rank == 1 and step >= 3:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        outputs += [checkpoint(inner, x, use_reentrant=True) for _ in range(2)]
    sum(sq(output) for output in outputs).backward()


def test_frozen_and_unfrozen_parameters(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_freezing))


def _freezing(rank: int, world: int) -> str:
    ddp, sharded, reference = _pair(world, Uneven)
    for step in range(9):
        for model in (ddp.module, reference.module):
            model.first.requires_grad_(step not in (2, 3))
            model.middle.weight.requires_grad_(step not in (0, 3, 4, 5))
        plain(ddp, rank, step)
        reference.run(plain, step)
        for each in (sharded, reference.optimizer):
            each.step()
            each.zero_grad()
        _assert_alike(ddp, reference, f"step {step}")
    assert set(sharded.state_dict()["state"]) == {name for name, _ in ddp.module.named_parameters()}
    return digest(ddp.module)


def test_parameters_added_later(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_growing))


def _growing(rank: int, world: int) -> str:
    ddp, sharded, reference = _pair(world, Branches)
    for step in range(6):
        if step == 2:
            for model, optimizer in ((ddp.module, sharded), (reference.module, reference.optimizer)):
                model.d = in_quarters(nn.Linear(3, 2))
                model.names = "abcd"
                optimizer.add_param_group({"params": list(model.d.parameters()), "lr": 0.1})
        plain(ddp, rank, step)
        reference.run(plain, step)
        for each in (sharded, reference.optimizer):
            each.step()
            each.zero_grad()
        _assert_alike(ddp, reference, f"step {step}")
    return digest(ddp.module)


def test_parameters_in_no_group(ranks: RankPool) -> None:
    for text in ranks(_forgotten):
        assert "d.weight, d.bias (2 parameter(s)) are trained by DistributedDataParallel but are in no" in text


def _forgotten(rank: int, world: int) -> str:
    ddp, sharded, _ = _pair(world, Branches)
    plain(ddp, rank, 0)
    sharded.step()
    ddp.module.d = in_quarters(nn.Linear(3, 2))
    ddp.module.names = "abcd"
    return raised(lambda: plain(ddp, rank, 1))


def test_an_optimizer_that_comes_after_some_passes(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_late_start))


def _late_start(rank: int, world: int) -> str:
    ddp, reference = DistributedDataParallel(Uneven()), OneProcess(Uneven(), world)
    for step in range(2):
        plain(ddp, rank, step)
        reference.run(plain, step)
    sharded = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1)
    reference.optimizer = torch.optim.SGD(reference.module.parameters(), lr=0.1)
    for step in range(2, 5):
        for each in (sharded, reference.optimizer):  # the first time on the gradients of the passes before
            each.step()
        _assert_alike(ddp, reference, f"step {step}")
        plain(ddp, rank, step)
        reference.run(plain, step)
    return digest(ddp.module)


def test_a_closure(ranks: RankPool) -> None:
    assert all(ranks(_closure))


def _closure(rank: int, world: int) -> bool:
    ddp, sharded, reference = _pair(world)

    def closure() -> torch.Tensor:
        sharded.zero_grad()
        loss = sq(ddp(batch(rank, 0)))
        loss.backward()
        return loss

    loss = sharded.step(closure)
    reference.train(plain, 0)
    _assert_alike(ddp, reference, "after the step")
    return bool(loss > 0)


def test_gradients_that_were_never_synchronised_are_reported(ranks: RankPool) -> None:
    for _, notes in ranks.run_with_warnings(_unsynchronised):
        assert "UnsynchronizedGradientsWarning" in notes[0]


def _unsynchronised(rank: int, world: int) -> None:
    ddp, sharded, _ = _pair(world)
    with ddp.no_sync():
        plain(ddp, rank, 0)
    sharded.step()


def test_parameters_that_were_given_other_memory(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_moved))


def _moved(rank: int, world: int) -> str:
    ddp, sharded, reference = _pair(world, Uneven)
    for step in range(3):
        plain(ddp, rank, step)
        reference.run(plain, step)
        for p in [*ddp.parameters(), *reference.module.parameters()]:
            p.data = p.data * 2
        for each in (sharded, reference.optimizer):
            each.step()
            each.zero_grad()
        _assert_alike(ddp, reference, f"step {step}")
    return digest(ddp.module)


def test_a_graph_from_before_the_step_is_refused(ranks: RankPool) -> None:
    for text in ranks(_stale_graph):
        assert "modified by an inplace operation" in text


def _stale_graph(rank: int, world: int) -> str:
    ddp, sharded, _ = _pair(world)
    loss = sq(ddp(batch(rank, 0)))
    loss.backward(retain_graph=True)
    sharded.step()
    return raised(loss.backward)


def test_every_run_gives_the_same_bits(ranks3: RankPool) -> None:
    first, second = (ranks3(_train_alike, build=Uneven, steps=3)[0] for _ in range(2))
    assert first == second


def test_state_and_gradients_are_divided(ranks3: RankPool) -> None:
    counts = ranks3(_count)
    total = sum(p.numel() for p in Uneven().parameters())
    assert sum(state for state, _ in counts) == total
    assert all(abs(state - total / 3) < 200 for state, _ in counts)
    assert all(kept == 0 for _, kept in counts)


def _count(rank: int, world: int) -> tuple[int, int]:
    ddp, sharded, _ = _pair(world, Uneven)
    plain(ddp, rank, 0)
    sharded.step()
    sharded.zero_grad()
    state = sum(values["exp_avg"].numel() for values in sharded._inner.state.values())
    kept = sum(bucket.shard.numel() for bucket in ddp.reducer.buckets if bucket.shard is not None)
    return state, kept


@pytest.mark.parametrize("joins", ["ddp", "both"])
def test_uneven_numbers_of_batches(ranks3: RankPool, joins: str) -> None:
    assert_equal_replicas(ranks3(_uneven, joins))


def _uneven(rank: int, world: int, joins: str) -> str:
    ddp, sharded, reference = _pair(world)

    def program(model: nn.Module, rank: int, step: int) -> None:
        if step < 2 + rank:
            plain(model, rank, step)

    with ddp.join() if joins == "ddp" else Join([ddp, sharded]):
        for step in range(2 + rank):
            plain(ddp, rank, step)
            sharded.step()
            sharded.zero_grad()
    for step in range(1 + world):
        reference.train(program, step)
    _assert_alike(ddp, reference, "in the end")
    plain(ddp, rank, 9)  # and on without join
    sharded.step()
    reference.train(plain, 9)
    _assert_alike(ddp, reference, "after join")
    return digest(ddp.module)


# ----------------------------------------------------------------- gradients


def test_a_sharded_gradient_says_what_it_is(ranks: RankPool) -> None:
    for texts in ranks(_look_at_gradients):
        clipped, normed, added, shown = texts
        for text in (clipped, normed, added):
            assert text.startswith("ShardedGradientError: rank ")
            assert "optimizer.clip_grad_norm_()" in text
        assert "'a.weight'" in normed
        assert shown == "ShardedGradient('a.weight', shape=(3, 3))"


def _look_at_gradients(rank: int, world: int) -> list[str]:
    ddp, _, _ = _pair(world)
    plain(ddp, rank, 0)
    grad = ddp.module.a.weight.grad
    assert (grad.shape, grad.dtype, grad.device.type) == ((3, 3), torch.float32, "cpu")
    return [
        raised(lambda: nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)),
        raised(lambda: grad.norm()),
        raised(lambda: grad + 1),
        repr(grad),
    ]


def test_a_plain_optimizer_cannot_step_on_slices(ranks: RankPool) -> None:
    for text in ranks(_plain_step):
        assert "ShardedGradientError" in text


def _plain_step(rank: int, world: int) -> str:
    ddp, _, _ = _pair(world)
    plain(ddp, rank, 0)
    return raised(torch.optim.SGD(ddp.parameters(), lr=0.1).step)


def test_whole_gradients_on_request(ranks: RankPool) -> None:
    ranks(_whole_gradients)


def _whole_gradients(rank: int, world: int) -> None:
    ddp, sharded, reference = _pair(world, Branches)
    for step in range(3):
        _used_at_times(ddp, rank, step)
        reference.run(_used_at_times, step)
        for (name, p), q in zip(ddp.module.named_parameters(), reference.module.parameters(), strict=True):
            whole = sharded.full_gradient(p)
            assert (whole is None) == (q.grad is None), name
            if whole is not None:
                assert type(p.grad) is ShardedGradient
                assert_near(whole, q.grad, name)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_norms_of_any_order(ranks: RankPool, order: float) -> None:
    ranks(_norms, order)


def _norms(rank: int, world: int, order: float) -> None:
    ddp, sharded, reference = _pair(world, Uneven)
    assert sharded.clip_grad_norm_(1.0, order) == 0
    plain(ddp, rank, 0)
    reference.run(plain, 0)
    before = sharded.clip_grad_norm_(float("inf"), order)
    assert_near(before, nn.utils.clip_grad_norm_(reference.module.parameters(), 0.01, order), "norm", rtol=1e-4)
    sharded.clip_grad_norm_(0.01, order)
    for p, q in zip(ddp.parameters(), reference.module.parameters(), strict=True):
        assert_near(sharded.full_gradient(p), q.grad, "clipped", rtol=1e-4)


def test_a_norm_that_is_not_finite_raises_everywhere(ranks: RankPool) -> None:
    for text in ranks(_infinite):
        assert "is inf, so they cannot be clipped" in text


def _infinite(rank: int, world: int) -> str:
    ddp, sharded, _ = _pair(world)
    (ddp(batch(rank, 0)).sum() * (float("inf") if rank else 1.0)).backward()
    for p in ddp.parameters():
        p.grad.mul_(1.0)
    return raised(lambda: sharded.clip_grad_norm_(1.0, float("inf"), error_if_nonfinite=True)).replace("nan", "inf")


# ----------------------------------------------------------------- saving and loading


def _save(rank: int, world: int, path: Path, steps: int) -> None:
    ddp, sharded, _ = _pair(world, Uneven, groups=_in_two_groups)
    for step in range(steps):
        _step_on_fixed_gradients(ddp, rank, step)
        sharded.step()
        sharded.zero_grad()
    state = sharded.state_dict(to=0)
    assert bool(state["state"]) == (rank == 0)
    if rank == 0:
        torch.save({"model": ddp.module.state_dict(), "optimizer": state}, path)
    dist.barrier()


def _step_on_fixed_gradients(model: nn.Module, rank: int, step: int) -> None:
    """The same batch on every rank, so that the number of ranks does not matter."""
    sq(model(batch(0, step))).backward()


def _resume(rank: int, world: int, path: Path, start: int, steps: int, is_late: bool) -> str:
    saved = torch.load(path, weights_only=True)
    ddp, sharded, reference = _pair(world, Uneven, groups=_in_two_groups)
    if is_late:  # the buckets have been planned anew by then
        _step_on_fixed_gradients(ddp, rank, 50)
        sharded.step()
        sharded.zero_grad()
    ddp.module.load_state_dict(saved["model"])
    sharded.load_state_dict(saved["optimizer"])
    for step in range(start + steps):
        _step_on_fixed_gradients(reference.module, rank, step)
        reference.optimizer.step()
        reference.optimizer.zero_grad()
    for step in range(start, start + steps):
        _step_on_fixed_gradients(ddp, rank, step)
        sharded.step()
        sharded.zero_grad()
    _assert_alike(ddp, reference, "resumed")
    return digest(ddp.module)


@pytest.mark.parametrize("is_late", [False, True])
def test_state_loads_at_another_number_of_ranks(
    ranks: RankPool, ranks3: RankPool, tmp_path: Path, is_late: bool
) -> None:
    ranks(_save, tmp_path / "two", 3)
    assert_equal_replicas(ranks3(_resume, tmp_path / "two", 3, 3, is_late))
    ranks3(_save, tmp_path / "three", 3)
    assert_equal_replicas(ranks(_resume, tmp_path / "three", 3, 3, is_late))


def test_state_loads_into_a_plain_optimizer(ranks: RankPool, tmp_path: Path) -> None:
    ranks(_save, tmp_path / "two", 3)
    saved = torch.load(tmp_path / "two", weights_only=True)
    resumed, straight = Uneven(), Uneven()
    resumed.load_state_dict(saved["model"])
    # the same groups, in another order
    optimizer = _ADAMW[0](list(reversed(_in_two_groups(resumed))), **_ADAMW[1])
    optimizer.load_state_dict(plain_optimizer_state(saved["optimizer"], optimizer, resumed))
    whole = _ADAMW[0](_in_two_groups(straight), **_ADAMW[1])
    for step in range(6):
        for model, each in ((straight, whole), (resumed, optimizer))[: 1 if step < 3 else 2]:
            _step_on_fixed_gradients(model, 0, step)
            each.step()
            each.zero_grad()
    for (name, p), q in zip(resumed.named_parameters(), straight.parameters(), strict=True):
        assert_near(p, q, name, rtol=1e-4)


def test_state_of_a_plain_optimizer_loads(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_from_plain))


def _from_plain(rank: int, world: int) -> str:
    ddp, sharded, reference = _pair(world, Uneven, _MOMENTUM)
    for step in range(2):
        reference.train(plain, step)
    ddp.module.load_state_dict(reference.module.state_dict())
    sharded.load_state_dict(copy.deepcopy(reference.optimizer.state_dict()))
    for step in range(2, 5):
        plain(ddp, rank, step)
        sharded.step()
        sharded.zero_grad()
        reference.train(plain, step)
    _assert_alike(ddp, reference, "in the end")
    return digest(ddp.module)


def test_state_of_another_model_is_refused(ranks: RankPool) -> None:
    for texts in ranks(_foreign_states):
        assert "parameter groups of [6] parameters, and the optimizer of [4]" in texts[0]
        assert "are only in one of the two" in texts[1]
        assert "'exp_avg' of shape (1, 2) for 'a.weight', whose shape is (3, 3)" in texts[2]


def _foreign_states(rank: int, world: int) -> list[str]:
    ddp, sharded, _ = _pair(world)
    other = torch.optim.AdamW(Branches().parameters(), lr=0.1)
    saved = sharded.state_dict()
    renamed, reshaped = copy.deepcopy(saved), copy.deepcopy(saved)
    renamed["param_groups"][0]["params"][0] = "z.weight"
    reshaped["state"] = {name: {"exp_avg": torch.zeros(1, 2)} for name in saved["param_groups"][0]["params"]}
    # which rank owns a.weight is the layout's affair; one of them finds out
    third = "the other rank: 'exp_avg' of shape (1, 2) for 'a.weight', whose shape is (3, 3)"
    if any(piece.name == "a.weight" for piece in sharded._sharding.pieces):
        third = raised(lambda: sharded.load_state_dict(reshaped))
    return [
        raised(lambda: sharded.load_state_dict(other.state_dict())),
        raised(lambda: sharded.load_state_dict(renamed)),
        third,
    ]


# ----------------------------------------------------------------- what is refused


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
        (torch.optim.SGD, {"lr": -1.0}, "Invalid learning rate"),
    ],
)
def test_optimizers_that_are_refused(ranks: RankPool, optimizer_class: Any, options: Any, reason: str) -> None:
    for text in ranks(_refused, optimizer_class, options):
        assert text.startswith("ConfigError")
        assert reason in text


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

    ddp, sharded, _ = _pair(world)
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
    ddp, sharded, _ = _pair(world)
    with Join([ddp]):
        plain(ddp, rank, 0)
        return [raised(sharded.step), raised(lambda: sharded.clip_grad_norm_(1.0))]
