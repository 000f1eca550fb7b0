"""What training on several ranks is compared with: one process that takes the batches of all of them."""

from collections.abc import Callable

import torch
from torch import nn


def train_on_all_batches(model: nn.Module, batch: Callable[[int, int], torch.Tensor], world: int, steps: int) -> None:
    """Train on the mean of the ranks' losses; ``batch(rank, step)`` is what a rank sees in a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum(model(batch(rank, step)).square().mean() for rank in range(world)) / world
        loss.backward()
        optimizer.step()
