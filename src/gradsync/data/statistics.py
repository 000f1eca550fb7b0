"""What is worth knowing of a corpus before hours are spent on it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gradsync.data.manifest import Commonest
from gradsync.data.shards import TokenArray
from gradsync.data.tokenizer import Tokenizer

SUSPICIOUS_SHARE = 0.6
"""More than any text reaches: in source code two fifths of GPT-2's tokens are single blanks."""

_CHUNK_TOKENS = 1 << 22


def commonest_token(arrays: Iterable[TokenArray], vocab_size: int) -> Commonest:
    """The most frequent token over all arrays, read once in bounded memory."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for array in arrays:
        for start in range(0, len(array), _CHUNK_TOKENS):
            counts += np.bincount(array[start : start + _CHUNK_TOKENS], minlength=vocab_size)
    token = int(counts.argmax())
    return Commonest(token, int(counts[token]) / max(int(counts.sum()), 1))


def warn_of(commonest: Commonest, tokenizer: Tokenizer) -> list[str]:
    """A sentence if the commonest token is so common that something must be wrong."""
    if commonest.share < SUSPICIOUS_SHARE:
        return []
    return [
        f"{commonest.share:.0%} of all tokens are the same one ({commonest.token}, "
        f"{tokenizer.decode([commonest.token])!r}): is this the right tokenizer for this text?"
    ]
