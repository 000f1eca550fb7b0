"""``mixed_precision``: low-precision parameters while the module runs, full precision everywhere else.

Weights are multiples of 1/4 and inputs small whole numbers, which bfloat16 holds exactly; so the results in
low precision equal those in full precision, unless a test is about the rounding.
"""

import copy
import io
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import (
    OneProcess,
    assert_equal_replicas,
    assert_same_gradients,
    batch,
    digest,
    in_quarters,
    raised,
    unsynced,
)
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from gradsync import DistributedDataParallel
from rank_pool import RankPool

BF16 = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _total(output: torch.Tensor) -> torch.Tensor:
    return output.float().sum() / 4


def _plain(model: nn.Module, rank: int, step: int) -> None:
    _total(model(batch(rank, step))).backward()


class _Probe(nn.Module):
    """A linear layer that writes down which dtypes it runs with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("offset", torch.ones(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: set[tuple[str, torch.dtype]] = set()
        in_quarters(self)

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        tensors = {"input": x, "offset": self.offset, "count": self.count, **dict(self.named_parameters())}
        self.seen = {(name, t.dtype) for name, t in tensors.items()}
        output: torch.Tensor = self.layer(x) * self.frozen + self.offset
        return output


def _dtypes(rank: int, world: int) -> None:
    config = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.float16)
    ddp = DistributedDataParallel(_Probe(), mixed_precision=config)
    for step in range(3):
        output = ddp(batch(rank, step), extra=[batch(rank, step), "text"])
        assert output.dtype == torch.float16 or output.dtype == torch.float32
        assert ddp.module.seen == {
            ("input", torch.bfloat16),
            ("layer.weight", torch.bfloat16),
            ("layer.bias", torch.bfloat16),
            ("frozen", torch.bfloat16),
            ("offset", torch.float16),
            ("count", torch.int64),
        }
        assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in ddp.parameters())
        output.float().sum().backward()
        assert all(p.dtype == torch.float32 for p in ddp.parameters())
        assert ddp.module.layer.weight.grad.dtype == torch.float32
        assert ddp.module.frozen.grad is None
    assert ddp.state_dict()["module.layer.weight"].dtype == torch.float32


def test_what_is_low_and_when(ranks: RankPool) -> None:
    ranks(_dtypes)


def _outputs(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(in_quarters(nn.Linear(3, 2)), mixed_precision=BF16)
    assert ddp(batch(rank, 0)).dtype == torch.bfloat16
    with torch.no_grad():
        assert ddp(batch(rank, 0)).dtype == torch.bfloat16
    assert ddp.eval()(batch(rank, 0)).dtype == torch.bfloat16
    assert ddp.module(batch(rank, 0)).dtype == torch.float32


def test_outputs_are_low(ranks: RankPool) -> None:
    ranks(_outputs)


# ----------------------------------------------------------------- values


class _Blocks(nn.Module):
    """Two linear blocks, of which one may be checkpointed."""

    def __init__(self, mode: str = "none") -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.c = nn.Linear(3, 2)
        self.mode = mode
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x)
        if self.mode == "none":
            hidden = self._middle(hidden)
        else:
            hidden = checkpoint(self._middle, hidden, use_reentrant=self.mode == "reentrant")
        output: torch.Tensor = self.c(hidden)
        return output

    def _middle(self, hidden: torch.Tensor) -> torch.Tensor:
        # reads the weight itself, so that no hook on a submodule could help
        return torch.relu(nn.functional.linear(hidden, self.b.weight, self.b.bias))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        in_quarters(self)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.table(x.long().abs() % 5))
        return output


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(5, 3, mode="sum", sparse=True)
        self.head = nn.Linear(3, 2)
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.table(x.long().abs() % 5))
        return output


def _like_full_precision(rank: int, world: int, build: Any, arguments: tuple[Any, ...], config: Any) -> str:
    """Low precision that holds every number gives the gradients of full precision."""
    reference = OneProcess(build(), world)
    ddp = DistributedDataParallel(build(*arguments), mixed_precision=config)
    for step in range(3):
        _plain(ddp, rank, step)
        reference.run(_plain, step)
        assert_same_gradients(ddp.module, reference.module, f"step {step}:", exact=True)
        ddp.zero_grad()
        reference.module.zero_grad()
    return digest(ddp.module)


@pytest.mark.parametrize("config", [BF16, _MixedPrecision(torch.bfloat16), _MixedPrecision(torch.float16)])
@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (_Blocks, ()),
        (_Blocks, ("reentrant",)),
        (_Blocks, ("plain",)),
        (_Tied, ()),
        (_Sparse, ()),
    ],
)
def test_gradients(ranks: RankPool, build: Any, arguments: tuple[Any, ...], config: _MixedPrecision) -> None:
    assert_equal_replicas(ranks(_like_full_precision, build, arguments, config))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 2)
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.lstm(x.unsqueeze(1))[0]
        return output


def _recurrent(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(_Recurrent(), mixed_precision=BF16)
    reference = OneProcess(_Recurrent(), world)
    _plain(ddp, rank, 0)
    reference.run(_plain, 0)
    for p, q in zip(ddp.module.parameters(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.02)


def test_a_recurrent_layer(ranks: RankPool) -> None:
    ranks(_recurrent)


def _accumulates_in_full(rank: int, world: int) -> None:
    """256 gradients of 1 + 1/128: a bfloat16 sum would have stopped counting the fractions early."""
    layer = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(layer, mixed_precision=BF16)
    x = torch.full((1, 1), 1 + 1 / 128)
    for step in range(256):
        context = ddp.no_sync() if step < 255 else unsynced(layer)
        with context:
            ddp(x).float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == 256 * (1 + 1 / 128)


def test_accumulation_is_in_full_precision(ranks: RankPool) -> None:
    ranks(_accumulates_in_full)


# ----------------------------------------------------------------- the wire


def _on_the_wire(rank: int, world: int) -> dict[str, float]:
    """The gradient is 1 + 2**-12 on both ranks, which float16 rounds to 1."""
    found = {}
    configs = {
        "nothing": _MixedPrecision(),
        "reduce": _MixedPrecision(reduce_dtype=torch.float16),
        "as parameters": _MixedPrecision(param_dtype=torch.float16),
        "full": _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
    }
    for name, config in configs.items():
        layer = nn.Linear(1, 1, bias=False)
        ddp = DistributedDataParallel(layer, mixed_precision=config)
        with ddp.no_sync():
            ddp(torch.tensor([[2.0**-12]])).float().sum().backward()
        ddp(torch.ones(1, 1)).float().sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
        found[name] = layer.weight.grad.item()
    return found


def test_the_dtype_of_the_reduction(ranks: RankPool) -> None:
    exact, rounded = 1 + 2.0**-12, 1.0
    expected = {"nothing": exact, "reduce": rounded, "as parameters": rounded, "full": exact}
    assert ranks(_on_the_wire) == [expected, expected]


def _large_gradients(rank: int, world: int) -> float:
    """40000 on each rank: the average fits into float16, the sum would not."""
    layer = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(layer, mixed_precision=_MixedPrecision(reduce_dtype=torch.float16))
    ddp(torch.full((1, 1), 40000.0)).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.item()


def test_the_sum_does_not_overflow(ranks: RankPool) -> None:
    assert ranks(_large_gradients) == [40000.0, 40000.0]


def _uneven(rank: int, world: int, initial: bool) -> list[float]:
    layer = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(layer, mixed_precision=_MixedPrecision(torch.bfloat16))
    grads = []
    with ddp.join(divide_by_initial_world_size=initial):
        for _ in range(1 + rank):
            ddp(torch.full((1, 1), rank + 1.0)).float().sum().backward()
            assert layer.weight.grad is not None
            grads.append(layer.weight.grad.item())
            layer.weight.grad = None
    return grads


def test_join_divides_as_without_low_precision(ranks: RankPool) -> None:
    assert ranks(_uneven, True) == [[1.5], [1.5, 1.0]]
    assert ranks(_uneven, False) == [[1.5], [1.5, 2.0]]


def _with_hook(rank: int, world: int) -> None:
    seen = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.buffer().dtype)
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    layer = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(layer, mixed_precision=_MixedPrecision(torch.bfloat16))
    ddp.register_comm_hook(None, hook)
    ddp(torch.ones(1, 1)).float().sum().backward()
    assert seen == [torch.float32]
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == world


def test_a_communication_hook_takes_the_place_of_the_reduction(ranks: RankPool) -> None:
    ranks(_with_hook)


# ----------------------------------------------------------------- everything else stays in full precision


def _ignored(rank: int, world: int) -> None:
    model = _Probe()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["layer.weight", "offset"])
    ddp = DistributedDataParallel(model, mixed_precision=_MixedPrecision(torch.float16, None, torch.float16))
    assert ddp.module.offset.dtype == torch.float32
    message = raised(lambda: ddp(batch(rank, 0)))
    assert "Half" in message  # a float32 weight meets a float16 input, as with torch's class
    assert dict(ddp.module.named_parameters())["layer.bias"].dtype == torch.float32


def test_ignored_tensors_stay_as_they_are(ranks: RankPool) -> None:
    ranks(_ignored)


class _Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken backward")


class _Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = in_quarters(nn.Linear(3, 2))
        self.fails_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_in == "forward":
            raise RuntimeError("broken forward")
        output: torch.Tensor = self.layer(x)
        return _Boom.apply(output) if self.fails_in == "backward" else output


def _fails(rank: int, world: int, where: str) -> None:
    ddp = DistributedDataParallel(_Failing(), mixed_precision=BF16)
    ddp.module.fails_in = where
    assert "broken" in raised(lambda: _plain(ddp, rank, 0))
    ddp.module.fails_in = ""
    assert all(type(p) is nn.Parameter for p in ddp.parameters())
    reference = OneProcess(_Failing(), world)
    for step in range(2):
        ddp.zero_grad()
        _plain(ddp, rank, step)
        reference.module.zero_grad()
        reference.run(_plain, step)
        assert_same_gradients(ddp.module, reference.module, exact=True)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception(ranks: RankPool, where: str) -> None:
    ranks(_fails, where)


def _set_trainable(parameters: Iterable[nn.Parameter], value: bool) -> None:
    for p in parameters:
        p.requires_grad_(value)


def _freezes(rank: int, world: int, mode: str) -> None:
    ddp = DistributedDataParallel(_Blocks(mode), mixed_precision=BF16)
    reference = OneProcess(_Blocks(), world)
    plans = []
    for step in range(6):
        for model in (ddp.module, reference.module):
            if step in (2, 4):
                _set_trainable(model.a.parameters(), step == 4)
            model.zero_grad()
        _plain(ddp, rank, step)
        reference.run(_plain, step)
        assert_same_gradients(ddp.module, reference.module, f"step {step}:", exact=True)
        plans.append(id(ddp.reducer.readiness))
    assert plans[0] == plans[1] and plans[2] == plans[3] and plans[4] == plans[5]  # no plan is made in vain


@pytest.mark.parametrize("mode", ["none", "plain"])
def test_freezing_and_unfreezing(ranks: RankPool, mode: str) -> None:
    ranks(_freezes, mode)


def _copies(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(_Blocks("plain"), mixed_precision=BF16)
    _plain(ddp, rank, 0)
    stream = io.BytesIO()
    torch.save(ddp, stream)
    stream.seek(0)
    for other in (copy.deepcopy(ddp), torch.load(stream, weights_only=False)):
        reference = OneProcess(_Blocks(), world)
        other.zero_grad()
        _plain(other, rank, 1)
        reference.run(_plain, 1)
        assert_same_gradients(other.module, reference.module, exact=True)
        assert other(batch(rank, 0)).dtype == torch.bfloat16


def test_copies(ranks: RankPool) -> None:
    ranks(_copies)


def _buffers_once(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    ddp = DistributedDataParallel(model, mixed_precision=_MixedPrecision(buffer_dtype=torch.float16))
    assert model[1].running_mean is not None and model[1].running_mean.dtype == torch.float16
    assert model[1].num_batches_tracked is not None and model[1].num_batches_tracked.dtype == torch.int64
    assert ddp.module[0].weight.dtype == torch.float32


def test_only_floating_buffers_are_cast(ranks: RankPool) -> None:
    ranks(_buffers_once)
