"""A model with a sharded optimizer and the same in one process with a plain one, trained side by side."""

from collections.abc import Callable
from typing import Any

import torch
from reference import OneProcess, TwoLayers, assert_near, batch, digest, plain, sq
from torch import nn

from gradsync import DistributedDataParallel, ZeroRedundancyOptimizer

# A large eps keeps rounding noise in gradients that are zero in theory from becoming whole steps.
ADAMW = (torch.optim.AdamW, {"lr": 0.005, "weight_decay": 0.3, "eps": 1e-4})
MOMENTUM = (torch.optim.SGD, {"lr": 0.001, "momentum": 0.9, "weight_decay": 0.1})


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


def in_two_groups(module: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in module.parameters() if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.5},
        {"params": [p for p in module.parameters() if p.dim() <= 1], "lr": 0.01},
    ]


def pair(
    world: int,
    build: Callable[[], nn.Module] = TwoLayers,
    optimizer: tuple[Any, dict[str, Any]] = ADAMW,
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


def assert_alike(ddp: Any, reference: OneProcess, when: str) -> None:
    """The order of additions differs, and what that does to the last bits grows from step to step."""
    for (name, p), q in zip(ddp.module.named_parameters(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{when}: {name}: {text}")


def train_alike(
    rank: int,
    world: int,
    program: Any = plain,
    steps: int = 20,
    max_norm: float | None = None,
    has_schedule: bool = False,
    divisor: float | None = None,
    **how: Any,
) -> str:
    ddp, sharded, reference = pair(world, **how)
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
        assert_alike(ddp, reference, f"after step {step}")
        for each in (sharded, reference.optimizer):
            each.zero_grad()
    ddp.verify_replicas()
    return digest(ddp.module)


def used_at_times(model: nn.Module, rank: int, step: int) -> None:
    """c is never used, b by rank 0 in even steps: neither decay nor momentum moves what no rank has used."""
    sq(model(batch(rank, step), "ab" if rank == 0 and step % 2 == 0 else "a")).backward()
