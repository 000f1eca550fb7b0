"""Which gradients are the result of a pass, whichever wrapper has reduced them: in a sum they count once.

A wrapper knows its own buckets. What its parameters have from another one, or from before they were frozen, is told
by the tensor.
"""

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary

_reduced: "WeakIdKeyDictionary" = WeakIdKeyDictionary()


def mark_reduced(tensors: Iterable[torch.Tensor]) -> None:
    """Take note that these tensors, where they are gradients, hold what all ranks have."""
    for tensor in tensors:
        _reduced[tensor] = True


def is_reduced(grad: torch.Tensor | None) -> bool:
    """Whether a gradient (of a DTensor its local part) is the result of a pass."""
    return grad is not None and grad in _reduced
