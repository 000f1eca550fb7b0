"""Micro-batches: inputs and the targets one token further on, as torch tensors.

Shapes: B sequences, T tokens of context.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED_TARGET = -1
"""Target of a place that holds no token; the model's loss leaves it out."""

MicroBatch = tuple[Tensor, Tensor]
"""Inputs and targets, both (B, T) and int64."""


def inputs_and_targets(windows: NDArray[np.int64]) -> MicroBatch:
    """Split windows (B, T + 1) into inputs and targets."""
    both = torch.from_numpy(windows)
    # Copies: two views of one memory would let an in-place change of the inputs reach the targets.
    return both[:, :-1].clone(memory_format=torch.contiguous_format), both[:, 1:].contiguous()


def filler(context: int) -> MicroBatch:
    """One sequence that counts for nothing, for a rank that must take part without having work."""
    inputs = torch.zeros((1, context), dtype=torch.int64)
    return inputs, torch.full_like(inputs, IGNORED_TARGET)
