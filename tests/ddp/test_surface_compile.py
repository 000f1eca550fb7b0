"""``torch.compile`` outside of the wrapper, inside, per block and around the whole step.

With backends that trace but generate no code, since what is compared is gradients, graphs and order. Warnings
are no errors here: Dynamo looks at tensors in ways that warn, and hides the warning.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from reference import OneProcess, assert_same_gradients, in_quarters, raised, whole_numbers
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.parallel.distributed import _MixedPrecision

from gradsync import DistributedDataParallel
from rank_pool import RankPool

pytestmark = pytest.mark.slow

# One linear layer fills one bucket of 1 MiB, the least that Dynamo splits its graph for.
_WIDTH = 512
_NUM_BLOCKS = 4
_SETTINGS: dict[str, Any] = {"bucket_cap_mb": 1}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x)) / _WIDTH


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block() for _ in range(_NUM_BLOCKS)])
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _x(rank: int, step: int) -> torch.Tensor:
    return whole_numbers(2, _WIDTH, key=(rank, step))


def _program(model: nn.Module, rank: int, step: int) -> None:
    model(_x(rank, step)).square().sum().backward()


Wrap = Callable[[nn.Module, Any], tuple[nn.Module, nn.Module]]
"""Returns what is called and the wrapper."""


def _outside(module: nn.Module, backend: Any) -> tuple[nn.Module, nn.Module]:
    ddp = DistributedDataParallel(module, **_SETTINGS)
    compiled: Any = torch.compile(ddp, backend=backend)
    return compiled, ddp


def _inside(module: nn.Module, backend: Any) -> tuple[nn.Module, nn.Module]:
    compiled: Any = torch.compile(module, backend=backend)
    ddp = DistributedDataParallel(compiled, **_SETTINGS)
    return ddp, ddp


def _in_place(module: nn.Module, backend: Any) -> tuple[nn.Module, nn.Module]:
    ddp = DistributedDataParallel(module, **_SETTINGS)
    ddp.compile(backend=backend)
    return ddp, ddp


def _per_block(module: nn.Module, backend: Any) -> tuple[nn.Module, nn.Module]:
    assert isinstance(module, _Net)
    for block in module.blocks:
        block.compile(backend=backend)
    ddp = DistributedDataParallel(module, **_SETTINGS)
    return ddp, ddp


def _compiled(rank: int, world: int, wrap: Wrap) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    backend = CompileCounterWithBackend("eager")
    module = _Net()
    called, ddp = wrap(module, backend)
    reference = OneProcess(_Net(), world)
    num_compiled = []
    for step in range(5):
        _program(called, rank, step)
        reference.run(_program, step)
        assert_same_gradients(module, reference.module, f"step {step}:")
        ddp.zero_grad()
        reference.module.zero_grad()
        num_compiled.append(backend.frame_count)
    assert dict(counters["recompiles"]) == {}
    return {"compiled": num_compiled, "graphs": counters["stats"]["unique_graphs"]}


@pytest.mark.parametrize("wrap", [_outside, _inside, _in_place])
def test_the_graph_is_split_at_the_buckets_and_compiled_once(ranks: RankPool, wrap: Wrap) -> None:
    for found in ranks(_compiled, wrap, warnings_as_errors=False):
        assert found == {"compiled": [_NUM_BLOCKS] * 5, "graphs": 1}


def test_blocks_are_compiled_once_each(ranks: RankPool) -> None:
    for found in ranks(_compiled, _per_block, warnings_as_errors=False):
        assert len(set(found["compiled"])) == 1
        assert 1 <= found["compiled"][0] <= _NUM_BLOCKS


def _whole_step(rank: int, world: int) -> list[int]:
    """Forward, backward and optimizer inside one compiled function: backward runs the engine under Dynamo's eyes."""
    torch._dynamo.reset()
    counters.clear()
    module = _Net()
    ddp = DistributedDataParallel(module, **_SETTINGS)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    reference = OneProcess(_Net(), world)

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def train_step(x: torch.Tensor) -> None:
        ddp(x).square().sum().backward()
        optimizer.step()

    num_graphs = []
    for step in range(3):
        train_step(_x(rank, step))
        reference.run(_program, step)
        assert_same_gradients(module, reference.module, f"step {step}:")
        reference.optimizer.step()
        ddp.zero_grad()
        reference.module.zero_grad()
        num_graphs.append(counters["stats"]["unique_graphs"])
    torch.testing.assert_close(module.state_dict(), reference.module.state_dict())
    return num_graphs


def test_a_compiled_step(ranks: RankPool) -> None:
    for num_graphs in ranks(_whole_step, warnings_as_errors=False):
        assert len(set(num_graphs[1:])) == 1


# ----------------------------------------------------------------- overlap


def _order(rank: int, world: int, wrap: Wrap) -> list[str]:
    torch._dynamo.reset()
    module = _Net()
    called, ddp = wrap(module, "aot_eager")
    events: list[str] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        events.append(f"bucket {bucket.index()}")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    assert isinstance(ddp, DistributedDataParallel)
    ddp.register_comm_hook(None, hook)
    first = module.blocks[0].layer.weight
    first.register_post_accumulate_grad_hook(lambda _: events.append("first layer done"))
    for step in range(3):
        events.clear()
        _program(called, rank, step)
    return events


@pytest.mark.parametrize("wrap", [_outside, _per_block])
def test_buckets_leave_before_backward_is_over(ranks: RankPool, wrap: Wrap) -> None:
    for events in ranks(_order, wrap, warnings_as_errors=False):
        assert events.index("bucket 0") < events.index("first layer done")
        assert events[-1] == f"bucket {len(events) - 2}"


# ----------------------------------------------------------------- what Dynamo asks for


class _Asks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.answer: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.answer = nn.parallel.DistributedDataParallel._get_active_ddp_module()
        output: torch.Tensor = self.layer(x)
        return output


def _active(rank: int, world: int) -> None:
    torchs = nn.parallel.DistributedDataParallel
    module = _Asks(2)
    ddp = DistributedDataParallel(module)
    assert torchs._get_active_ddp_module() is None
    ddp(torch.ones(1, 2))
    assert module.answer is ddp
    assert ddp.bucket_bytes_cap == 25 * 2**20
    tiny = DistributedDataParallel(_Asks(2), bucket_cap_mb=0.01)
    tiny(torch.ones(1, 2))
    assert tiny.module.answer.bucket_bytes_cap == 2**20  # Dynamo refuses less
    message = raised(lambda: ddp(torch.ones(1, 3)))
    assert "RuntimeError" in message
    assert torchs._get_active_ddp_module() is None
    assert DistributedDataParallel._get_active_ddp_module() is None


def test_the_active_wrapper(ranks: RankPool) -> None:
    ranks(_active)


def _tiny_buckets(rank: int, world: int) -> None:
    torch._dynamo.reset()
    module = _Net()
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.01)
    reference = OneProcess(_Net(), world)
    compiled: Any = torch.compile(ddp, backend="eager")
    _program(compiled, rank, 0)
    reference.run(_program, 0)
    assert_same_gradients(module, reference.module)


def test_buckets_smaller_than_dynamo_accepts(ranks: RankPool) -> None:
    ranks(_tiny_buckets, warnings_as_errors=False)


def _low_precision(rank: int, world: int) -> None:
    torch._dynamo.reset()
    counters.clear()
    eager, compiled_module = _Net(), _Net()
    config = _MixedPrecision(torch.bfloat16)
    plain = DistributedDataParallel(eager, mixed_precision=config)
    called: Any = torch.compile(DistributedDataParallel(compiled_module, mixed_precision=config), backend="eager")
    for step in range(3):
        for model in (plain, called):
            model.zero_grad()
            model(_x(rank, step)).float().square().sum().backward()
        for p, q in zip(eager.parameters(), compiled_module.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1


def test_mixed_precision_compiled(ranks: RankPool) -> None:
    ranks(_low_precision, warnings_as_errors=False)


def _compiled_autograd(rank: int, world: int) -> str:
    import torch._dynamo.compiled_autograd

    torch._dynamo.reset()
    ddp = DistributedDataParallel(_Block())
    loss = ddp(_x(rank, 0)).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        return raised(loss.backward)


def test_compiled_autograd_is_refused(ranks: RankPool) -> None:
    for message in ranks(_compiled_autograd, warnings_as_errors=False):
        assert "compiled autograd is not compatible" in message
