"""Validation batches: every token of a split predicted exactly once, whatever the number of ranks.

Shapes: B sequences of a micro-batch, T tokens of context.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradsync.data.batch import IGNORED_TARGET, MicroBatch, filler, inputs_and_targets
from gradsync.data.source import TokenSource
from gradsync.errors import DataError


def evaluation_batches(
    source: TokenSource,
    context: int,
    rank: int,
    world: int,
    micro_batch: int,
    max_sequences: int | None = None,
) -> Iterator[MicroBatch]:
    """This rank's share of the windows of ``source``; sum the losses and count targets that aren't -1.

    The windows do not overlap and the last, partial one of a shard is filled up with targets of -1.
    ``max_sequences`` takes that many windows, evenly spread over the source. Every rank gets the
    same number of batches, some of them fillers where the windows do not divide.
    """
    ends = check_evaluable(source, context)
    num_windows = int(ends[-1])
    num_taken = min(num_windows, max_sequences or num_windows)
    own = range(rank, num_taken, world)
    most_of_a_rank = -(-num_taken // world)
    for start in range(0, most_of_a_rank, micro_batch):
        batch = [number * num_windows // num_taken for number in own[start : start + micro_batch]]
        yield _read(source, context, ends, batch) if batch else filler(context)


def check_evaluable(source: TokenSource, context: int) -> NDArray[np.int64]:
    """Return where the windows of each shard end, counted through all of them; refuse a source without any."""
    ends = np.cumsum([-(-max(len(shard) - 1, 0) // context) for shard in source.shards])
    if len(ends) == 0 or ends[-1] == 0:
        raise DataError(
            f"{source.name} has {source.num_tokens:,} tokens; evaluation needs at least 2, "
            f"give more text or a larger validation fraction"
        )
    return ends


def _read(source: TokenSource, context: int, ends: NDArray[np.int64], windows: list[int]) -> MicroBatch:
    """The windows of these numbers, counted through all shards; ``ends`` is where each shard's end."""
    rows = np.full((len(windows), context + 1), IGNORED_TARGET, dtype=np.int64)
    for row, window in zip(rows, windows, strict=True):
        shard = int(np.searchsorted(ends, window, side="right"))
        first = int(ends[shard - 1]) if shard else 0
        source.read(shard, (window - first) * context, row)
    inputs, targets = inputs_and_targets(rows)
    # Places beyond the text need some valid id as input; nothing that is counted sees them.
    return inputs.clamp(min=0), targets
