"""Which part of a text is for validation: pure rules that depend on names, sizes and numbers alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

TRAIN = "train"
VAL = "val"
SPLITS = (TRAIN, VAL)

FEWEST_FILES_TO_CHOOSE_FROM = 20
"""With fewer files, choosing whole ones could miss the wanted share by far: the end is cut off."""


def choose_files(names: Sequence[str], sizes: Sequence[int], val_fraction: float) -> set[int]:
    """Positions of the files for validation: in an order that only the names decide, while they fit."""
    room = round(sum(sizes) * val_fraction)
    chosen = set()
    for position in sorted(range(len(names)), key=lambda i: (_hash(names[i]), names[i], i)):
        if sizes[position] <= room:
            chosen.add(position)
            room -= sizes[position]
    return chosen


def cut_at_end(size: int, val_fraction: float) -> int:
    """How much of a text stays for training when validation is its end."""
    return size - round(size * val_fraction)


def is_validation_record(number: int, val_fraction: float) -> bool:
    """Whether record ``number`` of an endless stream is for validation.

    Of every 1 / ``val_fraction`` records one is taken, at a place that looks random: an even comb
    would pick the same kind of record each time from data that repeats with that period.
    """
    if val_fraction <= 0.0:
        return False
    stratum = math.floor(number * val_fraction)
    first = math.ceil(stratum / val_fraction)
    # Rounding can put a record on the wrong side of a border; what matters is that all agree.
    length = max(math.ceil((stratum + 1) / val_fraction) - first, 1)
    return number == first + _hash(str(stratum)) % length


def _hash(text: str) -> int:
    # CRC-32 alone is linear: names that count up would not be spread over its low bits.
    return (zlib.crc32(text.encode("utf-8", errors="surrogateescape")) * 0x9E3779B1 & 0xFFFFFFFF) >> 8
