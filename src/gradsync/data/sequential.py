"""The plain per-process token loader: every rank walks the same tokens in steps of a global batch."""

from __future__ import annotations

from torch import Tensor

from gradsync.errors import ConfigError, DataError


class SequentialTokenLoader:
    """Batches (B, T) of consecutive tokens; rank r begins at token r * B * T.

    Every batch moves on by B * T * N tokens, so that N ranks together read all of them. When the
    next global batch would run past the end, all ranks begin again together.
    """

    def __init__(self, tokens: Tensor, batch: int, length: int, rank: int = 0, world: int = 1) -> None:
        if not 0 <= rank < world:
            raise ConfigError(f"rank {rank} is not one of {world} ranks (0 to {world - 1})")
        self.batch = batch
        self.length = length
        self.rank = rank
        self.world = world
        self._tokens = tokens
        self._start = 0
        self._per_rank = batch * length
        # The last input of a global batch has its target one token further on.
        needed = self._per_rank * world + 1
        if len(tokens) < needed:
            raise DataError(
                f"{len(tokens):,} tokens are fewer than one global batch of {world} ranks x {batch} x "
                f"{length} and the last target ({needed:,} tokens); give more text or a smaller batch"
            )

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both (B, T)."""
        start = self._start + self.rank * self._per_rank
        window = self._tokens[start : start + self._per_rank + 1]
        self._start += self._per_rank * self.world
        if self._start + self._per_rank * self.world + 1 > len(self._tokens):
            self._start = 0
        shape = (self.batch, self.length)
        return window[:-1].view(shape), window[1:].view(shape)
