"""torch.compile around the wrapper, around the module inside, and block by block."""

from typing import Any

import pytest
import torch
from reference import (
    OneProcess,
    assert_equal_replicas,
    batch,
    digest,
    in_quarters,
    sgd,
    sq,
    unsynced,
)
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankPool


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.head = nn.Linear(3, 2)
        in_quarters(self)

    def forward(self, x: torch.Tensor, skips: bool = False) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if not (skips and number == 1):
                x = torch.tanh(block(x))
        return self.head(x)


def _outside(module: nn.Module, arguments: dict[str, Any]) -> Any:
    return torch.compile(DistributedDataParallel(module, **arguments), backend="aot_eager")


def _inside(module: nn.Module, arguments: dict[str, Any]) -> Any:
    return DistributedDataParallel(torch.compile(module, backend="aot_eager"), **arguments)


def _in_place(module: nn.Module, arguments: dict[str, Any]) -> Any:
    module.compile(backend="aot_eager")
    return DistributedDataParallel(module, **arguments)


def _block_by_block(module: Any, arguments: dict[str, Any]) -> Any:
    for number, block in enumerate(module.blocks):
        module.blocks[number] = torch.compile(block, backend="aot_eager")
    return DistributedDataParallel(module, **arguments)


def _program(model: nn.Module, rank: int, step: int) -> None:
    """One unsynchronised micro-step and one that leaves out a block on one rank."""
    with unsynced(model):
        sq(model(batch(rank, step))).backward()
    sq(model(batch(rank, step, which=1), rank == 1)).backward()


def _compiled(rank: int, world: int, wrap: Any, arguments: dict[str, Any]) -> str:
    torch._dynamo.reset()
    module = _Blocks()
    model = wrap(module, arguments)
    reference = OneProcess(_Blocks(), world, sgd(0.25))
    optimizer = sgd(0.25)(model.parameters())
    for step in range(4):
        _program(model, rank, step)
        reference.run(_program, step)
        got, want = [list(m.parameters()) for m in (module, reference.module)]
        for p, q in zip(got, want, strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
        for each in (optimizer, reference.optimizer):
            each.step()
            each.zero_grad()
    return digest(module)


@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb": 1e-6}])
@pytest.mark.parametrize("wrap", [_outside, _inside, _in_place, _block_by_block])
def test_compiled_models(ranks: RankPool, wrap: Any, arguments: dict[str, Any]) -> None:
    # Dynamo itself looks at .grad of tensors that are no leaves, which warns
    assert_equal_replicas(ranks(_compiled, wrap, arguments, timeout_s=150, warnings_as_errors=False))


def _launches(rank: int, world: int) -> list[str]:
    """Block by block, buckets leave while backward still runs: a hook on the first block's input sees them gone."""
    torch._dynamo.reset()
    ddp = _block_by_block(_Blocks(), {"bucket_cap_mb": 1e-6})
    events: list[str] = []

    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        events.append("launch")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    for step in range(3):
        events.clear()
        x = batch(rank, step).requires_grad_()
        x.register_hook(lambda _: events.append("end of backward"))
        sq(ddp(x)).backward()
    return events


def test_the_overlap_stays_block_by_block(ranks: RankPool) -> None:
    for events in ranks(_launches, timeout_s=150):
        assert events.count("launch") == 8
        assert events.index("end of backward") >= 5
