"""The learning rate as a pure function of the optimizer step, and how it is put into an optimizer.

Steps here are optimizer steps: micro-batches and ranks don't count. Which parameters decay is the
model's own knowledge (``decay_groups``).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gradsync.ddp.sharded_optimizer import ZeroRedundancyOptimizer
from gradsync.model.gpt2 import decay_groups, has_fused_optimizer
from gradsync.parallel.replica import Replica
from gradsync.train.config import TrainConfig


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to ``peak``, then a cosine down to ``peak * min_fraction`` at the last step."""

    peak: float
    min_fraction: float
    warmup_steps: int
    total_steps: int

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        decay_steps = self.total_steps - self.warmup_steps
        progress = min((step - self.warmup_steps) / decay_steps, 1.0) if decay_steps > 0 else 1.0
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.min_fraction + (1.0 - self.min_fraction) * cosine)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give every parameter group the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def make_optimizer(config: TrainConfig, replica: Replica, device: torch.device) -> Optimizer:
    """Return AdamW for what this rank holds; with ``--strategy zero``, for its share of it (collective)."""
    tensors = [held.tensor for held in replica.held.values()]
    groups = [group for part in by_mesh(tensors) for group in decay_groups(part, config.weight_decay)]
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "fused": has_fused_optimizer(device.type),
    }
    if config.strategy == "zero" and replica.ddp is not None:
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, ddp=replica.ddp, **options)
    return torch.optim.AdamW(groups, **options)


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Any]]:
    """Divide parameters by what they are spread over: one fused step takes those of one mesh only."""
    groups: dict[Any, list[Any]] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.nn.Parameter):
            groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())
