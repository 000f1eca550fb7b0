"""A token source: the tokens of one split as one or several arrays, in memory or memory-mapped.

Windows of it are cut by ``loader.py`` (training) and ``evaluation.py`` (validation).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradsync.data.shards import TokenArray


class TokenSource:
    """The tokens of one split; windows never reach from one shard into the next."""

    def __init__(self, shards: Sequence[TokenArray], name: str) -> None:
        self.shards = tuple(shards)
        self.name = name
        self.num_tokens = sum(len(shard) for shard in self.shards)

    def windows_per_shard(self, context: int) -> NDArray[np.int64]:
        """How many whole windows of ``context`` inputs and their targets each shard holds."""
        # The target of a window's last input is one token further on.
        counts = [max(len(shard) - 1, 0) // context for shard in self.shards]
        return np.array(counts, dtype=np.int64)

    def read(self, shard: int, start: int, out: NDArray[Any]) -> int:
        """Copy tokens of one shard from ``start`` into ``out``; returns how many there were."""
        piece = self.shards[shard][start : start + len(out)]
        out[: len(piece)] = piece
        return len(piece)
