"""The memory of a shared segment: where tensors lie, and that it is given back."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from gradsync.comm.segment import Segment, default_reserve_bytes, map_peer
from gradsync.errors import BackendError

MIB = 2**20


@pytest.fixture
def segment() -> Iterator[Segment]:
    result = Segment(256 * MIB)
    yield result
    result.close_descriptor()


def used_bytes(segment: Segment) -> int:
    return os.fstat(segment.descriptor).st_blocks * 512


def test_tensors_are_zero_and_lie_in_the_segment(segment: Segment) -> None:
    tensors = [segment.allocate(1000, dtype) for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64)]
    for tensor in tensors:
        assert not tensor.any()
        offset = segment.offset_of(tensor.data_ptr(), tensor.nbytes)
        assert offset is not None
        tensor.fill_(1)
        assert segment.bytes[offset : offset + tensor.nbytes].tobytes() == tensor.view(torch.uint8).numpy().tobytes()
        assert segment.offset_of(tensor[10:].data_ptr(), 4) == offset + 10 * tensor.itemsize
    elsewhere = torch.ones(10)
    assert segment.offset_of(elsewhere.data_ptr(), elsewhere.nbytes) is None
    assert segment.allocate(0, torch.float32).shape == (0,)


def test_addresses_cost_no_memory_until_they_are_written(segment: Segment) -> None:
    tensor = segment.allocate(10 * MIB, torch.float32)
    assert used_bytes(segment) < MIB
    tensor[: MIB // 4].fill_(1)
    assert MIB <= used_bytes(segment) < 2 * MIB


def test_memory_is_given_back_when_the_last_view_dies(segment: Segment) -> None:
    tensor = segment.allocate(4 * MIB, torch.float32).fill_(1)
    view = tensor[5:10]
    del tensor
    gc.collect()
    assert used_bytes(segment) >= 16 * MIB and view.eq(1).all()
    del view
    gc.collect()
    assert used_bytes(segment) < MIB
    assert not segment.allocate(4 * MIB, torch.float32).any()


def test_freed_addresses_are_used_again(segment: Segment) -> None:
    for _ in range(100):
        blocks = [segment.allocate(size * MIB, torch.uint8) for size in (30, 60, 90)]
        del blocks[1]
        assert segment.allocate(60 * MIB, torch.uint8).numel() == 60 * MIB
        del blocks
    assert segment.allocate(250 * MIB, torch.uint8).numel() == 250 * MIB


def test_a_full_segment_says_so(segment: Segment) -> None:
    with pytest.raises(BackendError, match="is full"):
        segment.allocate(257 * MIB, torch.uint8)


def test_a_peer_sees_the_same_memory(segment: Segment) -> None:
    tensor = segment.allocate(100, torch.uint8)
    offset = segment.offset_of(tensor.data_ptr(), 100)
    assert offset is not None
    mapped = map_peer(os.dup(segment.descriptor), segment.size)
    mapped[offset] = 7
    assert tensor[0].item() == 7


def test_the_reservation_is_bounded() -> None:
    assert 256 * MIB <= default_reserve_bytes(10_000) <= default_reserve_bytes(2)
