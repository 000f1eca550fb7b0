"""Validation batches: every token of a split predicted exactly once, whatever the number of ranks.

Shapes: B sequences of a micro-batch, T tokens of context.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

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
    windows = _windows(source, context)
    if not windows:
        raise DataError(
            f"{source.name} has {source.num_tokens:,} tokens; evaluation needs at least 2, "
            f"give more text or a larger validation fraction"
        )
    if max_sequences is not None and max_sequences < len(windows):
        windows = [windows[i * len(windows) // max_sequences] for i in range(max_sequences)]
    own = windows[rank::world]
    most_of_a_rank = -(-len(windows) // world)
    for start in range(0, most_of_a_rank, micro_batch):
        batch = own[start : start + micro_batch]
        yield _read(source, context, batch) if batch else filler(context)


def _windows(source: TokenSource, context: int) -> list[tuple[int, int]]:
    """Shard and first token of every window that holds at least one target."""
    return [
        (number, start) for number, shard in enumerate(source.shards) for start in range(0, len(shard) - 1, context)
    ]


def _read(source: TokenSource, context: int, windows: list[tuple[int, int]]) -> MicroBatch:
    rows = np.full((len(windows), context + 1), IGNORED_TARGET, dtype=np.int64)
    for row, (shard, start) in zip(rows, windows, strict=True):
        source.read(shard, start, row)
    inputs, targets = inputs_and_targets(rows)
    # Places beyond the text need some valid id as input; nothing that is counted sees them.
    return inputs.clamp(min=0), targets
