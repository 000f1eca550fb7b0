"""However a tensor is cut, the pieces of all ranks are the tensor, once."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.parallel.pieces import Cut, Pieces, assembled, chunk_of, copied_to_cpu, cut_flat, cut_rectangle
from gradsync.train.storage import load_tensors, save_tensors

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def numbered(shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


@given(SHAPES, st.integers(1, 5))
def test_ranges_of_a_flattened_tensor(shape, world):
    whole = numbered(shape)
    pieces = []
    for rank in range(world):
        own = chunk_of(whole.numel(), world, rank)
        cut = cut_flat(shape, own)
        assert cut.boxes is not None and len(cut.boxes) <= 2 * len(shape) - 1
        pieces.append(cut.of(whole.flatten()[own.start : own.stop]))
    assert torch.equal(assembled(pieces), whole)


@given(SHAPES, st.integers(1, 4), st.data())
def test_rows_or_columns(shape, world, data):
    whole = numbered(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    pieces = []
    for rank in range(world):
        own = chunk_of(shape[dim], world, rank)
        local = whole.narrow(dim, own.start, len(own)).contiguous()
        pieces.append(cut_rectangle(shape, {dim: own}).of(local))
    assert torch.equal(assembled(pieces), whole)


@pytest.mark.parametrize("data_ranks", [1, 2, 3])
@pytest.mark.parametrize("shares", [1, 2, 4])
def test_stacked_matrices_cut_by_heads_and_then_by_rows(shares, data_ranks):
    """As query, key and value are: each share has its part of all three, and FSDP cuts that anywhere."""
    whole = numbered((24, 2))
    by_share = whole.view(3, shares, -1, 2).transpose(0, 1).reshape(shares, -1, 2)
    pieces = []
    for share in range(shares):
        rows = chunk_of(24, shares, share)
        for rank in range(data_ranks):
            part = chunk_of(len(rows), data_ranks, rank)
            held = {0: rows[part.start : part.stop]}
            pieces.append(cut_rectangle((24, 2), held, 3, shares).of(by_share[share][part.start : part.stop].clone()))
    assert torch.equal(assembled(pieces), whole)


def test_chunks_are_torchs():
    for size in range(1, 9):
        for count in range(1, 5):
            expected = [len(part) for part in torch.arange(size).chunk(count)]
            found = [len(chunk_of(size, count, index)) for index in range(count)]
            assert [length for length in found if length] == expected


def test_pieces_share_memory_and_copies_do_not():
    flat = torch.zeros(4)
    pieces = cut_flat((2, 3), range(1, 5)).of(flat)
    assert isinstance(pieces, Pieces)
    copy = copied_to_cpu(pieces)
    for _, part in pieces.parts:
        part.fill_(1.0)
    assert flat.tolist() == [1.0] * 4
    assert isinstance(copy, Pieces)
    assert all(not part.any() for _, part in copy.parts)


def test_a_missing_part_is_noticed():
    with pytest.raises(ValueError, match="2 elements .* are on no rank"):
        assembled([cut_rectangle((3, 2), {0: range(2)}).of(torch.zeros(2, 2))])


def test_what_is_whole_is_the_tensor_itself():
    tensor = numbered((2, 3))
    assert cut_rectangle((2, 3), {0: range(2)}) == Cut((2, 3))
    assert assembled([Cut((2, 3)).of(tensor)]) is not None


def test_a_checkpoint_fills_pieces_at_their_places(tmp_path):
    whole, scalar = numbered((4, 5)), torch.tensor(3.0)
    save_tensors(tmp_path, {"whole": whole, "scalar": scalar}, None)
    flat, number = torch.zeros(9), torch.zeros(())
    columns = torch.zeros(4, 2)
    loaded = {"whole": cut_flat((4, 5), range(3, 12)).of(flat), "scalar": number}
    load_tensors(tmp_path, loaded)
    load_tensors(tmp_path, {"whole": cut_rectangle((4, 5), {1: range(1, 3)}).of(columns)})
    assert torch.equal(flat, whole.flatten()[3:12])
    assert torch.equal(columns, whole[:, 1:3])
    assert number == 3.0
