"""Where the part of a tensor that a rank holds lies in the whole tensor: what makes one checkpoint fit every layout.

A *box* is a rectangle of the whole tensor. Whatever the parallelism, what a rank holds of a tensor is a few boxes: a
range of rows or columns; of three matrices under each other (query, key, value) a range of rows in each; of a range
of a flattened tensor its first, partial row, whole rows, and the last, partial one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Box:
    """A rectangle of a whole tensor, which is rows ``first`` to ``last`` of the local one."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True)
class Cut:
    """Which boxes of a tensor of this shape are held; None: all of it."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...] | None = None

    def of(self, tensor: Tensor) -> "Tensor | Pieces":
        """Return the local tensor as parts of the whole; they share its memory."""
        local = local_part(tensor)
        if self.boxes is None:
            return local
        parts = [(box.offset, local[box.first : box.last].view(box.size)) for box in self.boxes]
        return Pieces(self.shape, local.dtype, parts)


class Pieces:
    """Parts of one whole tensor; torch.distributed.checkpoint stores and fills each at its place."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, parts: list[tuple[tuple[int, ...], Tensor]]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.parts = parts

    @property
    def nbytes(self) -> int:
        """Size of the parts held."""
        return sum(part.nbytes for _, part in self.parts)

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return torch.Size(self.shape)

    def copied_to_cpu(self) -> "Pieces":
        """Return the same pieces in memory of their own."""
        parts = [(offset, part.detach().to("cpu", copy=True)) for offset, part in self.parts]
        return Pieces(self.shape, self.dtype, parts)

    def at(self, offset: Sequence[int]) -> Tensor:
        """Return the part that begins there."""
        return next(part for own, part in self.parts if own == tuple(offset))

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), part.size()) for offset, part in self.parts]


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, without autograd's history."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copied_to_cpu(value: Tensor | Pieces) -> Tensor | Pieces:
    """Return a copy on the CPU."""
    return value.copied_to_cpu() if isinstance(value, Pieces) else value.detach().to("cpu", copy=True)


def chunk_of(size: int, count: int, index: int) -> range:
    """Return the part of ``range(size)`` that number ``index`` of ``count`` gets from ``torch.chunk``."""
    length = -(-size // count)
    return range(min(length * index, size), min(length * (index + 1), size))


def cut_rectangle(shape: Sequence[int], held: dict[int, range], stacked: int = 1, shares: int = 1) -> Cut:
    """Return the cut that holds a range along some dimensions.

    ``stacked``: along the first dimension the tensor is that many matrices one under the other, of which each of
    ``shares`` ranks holds its part of every one; the range then counts rank by rank (all that the first rank holds,
    then the second's).
    """
    ranges = [held.get(dim, range(size)) for dim, size in enumerate(shape)]
    if all(len(own) == size for own, size in zip(ranges, shape, strict=True)):
        return Cut(tuple(shape))
    if any(len(own) == 0 for own in ranges):
        return Cut(tuple(shape), ())
    rows = ranges[0]
    boxes = []
    for start, whole_start, length in _true_rows(rows, shape[0], stacked, shares):
        offset = (whole_start, *(own.start for own in ranges[1:]))
        size = (length, *(len(own) for own in ranges[1:]))
        boxes.append(Box(offset, size, start - rows.start, start - rows.start + length))
    return Cut(tuple(shape), tuple(boxes))


def cut_flat(shape: Sequence[int], held: range) -> Cut:
    """Return the cut that holds a range of the flattened tensor."""
    boxes = tuple(
        Box(offset, size, start - held.start, stop - held.start)
        for offset, size, start, stop in _flat_boxes(tuple(shape), held.start, held.stop)
    )
    return Cut(tuple(shape), boxes)


def assembled(pieces: Sequence[Tensor | Pieces]) -> Tensor:
    """Return the whole tensor from what ranks hold of it.

    Raises:
        ValueError: part of it is held by no rank.
    """
    whole = next((part for part in pieces if isinstance(part, Tensor)), None)
    if whole is not None:
        return whole
    first = pieces[0]
    assert isinstance(first, Pieces)
    result = torch.empty(first.shape, dtype=first.dtype)
    is_there = torch.zeros(first.shape, dtype=torch.bool)
    for held in pieces:
        assert isinstance(held, Pieces)
        for offset, part in held.parts:
            place = tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))
            result[place], is_there[place] = part, True
    if not bool(is_there.all()):
        raise ValueError(f"{int((~is_there).sum())} elements of a tensor of shape {first.shape} are on no rank")
    return result


def _true_rows(rows: range, size: int, stacked: int, shares: int) -> Iterator[tuple[int, int, int]]:
    """Yield runs of rows: where each begins in the order by ranks, where in the whole, and its length."""
    if stacked == 1:
        yield rows.start, rows.start, len(rows)
        return
    run = size // stacked // shares
    start = rows.start
    while start < rows.stop:
        stop = min((start // run + 1) * run, rows.stop)
        share, matrix = divmod(start // run, stacked)
        yield start, (matrix * shares + share) * run + start % run, stop - start
        start = stop


def _flat_boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
    """Yield (offset, size, flat start, flat stop) of boxes that make up a range of the flattened tensor."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,), start, stop) if shape else ((), (), start, stop)
        return
    row = 1
    for size in shape[1:]:
        row *= size
    first_whole, last_whole = -(-start // row), stop // row
    if first_whole > last_whole:  # inside one row
        first_whole = last_whole = start // row
        yield from _inside_row(shape, first_whole, row, start, stop)
        return
    yield from _inside_row(shape, first_whole - 1, row, start, first_whole * row)
    if first_whole < last_whole:
        zeros = (0,) * (len(shape) - 1)
        yield (first_whole, *zeros), (last_whole - first_whole, *shape[1:]), first_whole * row, last_whole * row
    yield from _inside_row(shape, last_whole, row, last_whole * row, stop)


def _inside_row(
    shape: tuple[int, ...], index: int, row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
    base = index * row
    for offset, size, own_start, own_stop in _flat_boxes(shape[1:], start - base, stop - base):
        yield (index, *offset), (1, *size), own_start + base, own_stop + base
