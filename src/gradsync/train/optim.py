"""The learning rate as a pure function of the optimizer step, and how it is put into an optimizer.

Steps here are optimizer steps: micro-batches and ranks don't count. Which parameters decay is the
model's own knowledge (``configure_optimizers``).
"""

import math
from dataclasses import dataclass

from torch.optim import Optimizer


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
