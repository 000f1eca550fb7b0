"""The whole vocabulary on one rank: the counterpart of ``tensor.CutVocabulary``."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from gradsync.model.gpt2 import IGNORED_TARGET


class Vocabulary(Protocol):
    """What the logits of a stage are of, and what to make of them."""

    def summed_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over all targets."""

    def losses(self) -> AbstractContextManager[None]:
        """For taking losses and running their backward."""

    def gathered(self, logits: Tensor) -> Tensor:
        """Return the logits of all real tokens; collective where they are cut."""


@dataclass(frozen=True)
class WholeVocabulary:
    """All columns are here, those of the padding last."""

    size: int

    def summed_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over all targets (B, T), from logits (B, T, V)."""
        real = logits[..., : self.size].float().flatten(0, 1)
        return F.cross_entropy(real, targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")

    def losses(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def gathered(self, logits: Tensor) -> Tensor:
        """Return the logits without those of the padding."""
        return logits.detach()[..., : self.size].contiguous()
