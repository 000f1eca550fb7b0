"""A part of a GPT-2: some blocks, and what stands before the first and after the last of them.

The parts keep the names that they have in the whole model. The arithmetic is that of ``model.gpt2``; only the end
differs: a stage returns hidden states or logits, and what is made of the logits is ``Vocabulary``'s.

Shapes: B sequences, T tokens, C channels, V vocabulary with its padding (or this rank's columns of it). Where sequences
are cut (``tensor``), hidden states are those of this rank's slice of the T tokens.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradsync.errors import ConfigError
from gradsync.model.gpt2 import GPT2


class Stage(nn.Module):
    """Blocks ``blocks`` of a model, whose modules it takes over; its forward runs in ``context`` (autocast, say)."""

    def __init__(self, model: GPT2, blocks: range, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        whole = model.transformer
        self.config = model.config
        self._context = context
        self.activation_checkpointing = model.activation_checkpointing
        self.is_first = blocks.start == 0
        self.is_last = blocks.stop == len(whole.h)
        self.transformer = nn.Module()
        if self.is_first:
            self.transformer.wte, self.transformer.wpe, self.transformer.drop = whole.wte, whole.wpe, whole.drop
        self.transformer.h = nn.ModuleDict({str(index): whole.h[index] for index in blocks})
        if self.is_last:
            self.transformer.ln_f = whole.ln_f
            self.lm_head = model.lm_head

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks, in order."""
        return list(self.transformer.h.children())  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (B, T) or hidden states (B, T, C) -> hidden states (B, T, C) or logits (B, T, V)."""
        with self._context():
            if self.is_first:
                x = self._embedded(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.activation_checkpointing else block(x)
            return self.lm_head(self.transformer.ln_f(x)) if self.is_last else x  # type: ignore[operator, no-any-return]

    def _embedded(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.config.context:
            raise ConfigError(
                f"a sequence of {tokens.shape[1]} tokens is longer than the model's context of "
                f"{self.config.context}; cut it, or build the model with a longer context"
            )
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        parts = self.transformer
        return parts.drop(parts.wte(tokens) + parts.wpe(positions))  # type: ignore[operator, no-any-return]


def split_blocks(num_blocks: int, num_stages: int) -> list[range]:
    """Return the blocks of each stage, as equal in number as can be; the first stages have the more.

    The last one has the head to compute besides.
    """
    least, more = divmod(num_blocks, num_stages)
    ends = [0]
    for index in range(num_stages):
        ends.append(ends[-1] + least + (index < more))
    return [range(first, last) for first, last in zip(ends, ends[1:], strict=False)]
