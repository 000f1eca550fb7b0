"""Shards: what is written comes back; whatever is damaged, cut, foreign or out of range is refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.data.shards import HEADER_BYTES, ShardWriter, open_shard, token_dtype
from gradsync.errors import DataError


def _write(path: Path, ids: list[int], vocab_size: int = 257) -> Path:
    with ShardWriter(path, vocab_size) as writer:
        writer.write(np.array(ids, dtype=np.int64))
    return path


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return _write(tmp_path / "some.tokens", list(range(200)))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "<u2"), (65536, "<u2"), (65537, "<u4"), (2**32, "<u4")])
def test_ids_take_the_bytes_that_the_vocabulary_needs(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(dtype)


@pytest.mark.parametrize("vocab_size", [257, 100_000])
def test_pieces_come_back_as_one(tmp_path: Path, vocab_size: int) -> None:
    with ShardWriter(tmp_path / "a.tokens", vocab_size) as writer:
        for piece in ([1, 2, 3], [], [vocab_size - 1, 0]):
            writer.write(np.array(piece, dtype=np.int64))
    shard = open_shard(tmp_path / "a.tokens")
    shard.verify()
    assert isinstance(shard.tokens, np.memmap)
    assert shard.tokens.tolist() == [1, 2, 3, vocab_size - 1, 0]
    assert (shard.header.vocab_size, shard.header.num_tokens) == (vocab_size, 5)


def test_an_empty_shard_is_a_shard(tmp_path: Path) -> None:
    shard = open_shard(_write(tmp_path / "empty.tokens", []))
    shard.verify()
    assert len(shard.tokens) == 0


@pytest.mark.parametrize("token", [-1, 257, 70_000])
def test_ids_beyond_the_vocabulary_are_not_written(tmp_path: Path, token: int) -> None:
    with pytest.raises(DataError, match=rf"bad\.tokens: token id {token} is outside the vocabulary of 257"):
        _write(tmp_path / "bad.tokens", [1, token])
    assert list(tmp_path.iterdir()) == []


def test_nothing_appears_under_the_name_before_it_is_whole(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "late.tokens", 257)
    writer.write(np.array([1, 2]))
    assert not (tmp_path / "late.tokens").exists()
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["late.tokens"]


def test_a_truncated_shard_is_refused_by_name(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"some\.tokens is truncated: 463 bytes, 200 tokens take 464"):
        open_shard(shard)


def test_a_shard_cut_within_its_header_is_refused(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:20])
    with pytest.raises(DataError, match=r"some\.tokens is truncated: 20 bytes"):
        open_shard(shard)


def test_a_shard_with_something_behind_it_is_refused(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes() + b"x")
    with pytest.raises(DataError, match="longer than it says"):
        open_shard(shard)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"PK\x03\x04" * 40, b"GRDSYNC"])
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.tokens"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"foreign\.tokens is not a gradsync token shard"):
        open_shard(path)


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the token shard .*gone\.tokens: No such file"):
        open_shard(tmp_path / "gone.tokens")


@settings(max_examples=60)
@given(place=st.integers(8, HEADER_BYTES - 1), flip=st.integers(1, 255))
def test_any_change_to_the_header_is_seen(tmp_path_factory: pytest.TempPathFactory, place: int, flip: int) -> None:
    path = _write(tmp_path_factory.getbasetemp() / "header.tokens", list(range(50)))
    content = bytearray(path.read_bytes())
    content[place] ^= flip
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"header\.tokens is"):
        open_shard(path)


@settings(max_examples=60)
@given(place=st.integers(HEADER_BYTES, HEADER_BYTES + 99), flip=st.integers(1, 255))
def test_any_change_to_the_tokens_is_seen(tmp_path_factory: pytest.TempPathFactory, place: int, flip: int) -> None:
    path = _write(tmp_path_factory.getbasetemp() / "body.tokens", list(range(50)), vocab_size=65536)
    content = bytearray(path.read_bytes())
    content[place] ^= flip
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"body\.tokens is damaged: its tokens do not match its checksum"):
        open_shard(path).verify()


@pytest.mark.parametrize("has_got_its_name", [False, True])
def test_a_later_writer_goes_on_where_it_is_told(tmp_path: Path, has_got_its_name: bool) -> None:
    path = tmp_path / "a.tokens"
    first = ShardWriter(path, 257)
    first.write(np.arange(100))
    if has_got_its_name:
        first.close()
    else:
        first.release()
    with ShardWriter(path, 257, keep_tokens=60) as second:
        second.write(np.arange(60, 80))
    assert path.read_bytes() == _write(tmp_path / "b.tokens", list(range(80))).read_bytes()


def test_a_later_writer_misses_what_is_not_there(tmp_path: Path) -> None:
    first = ShardWriter(tmp_path / "a.tokens", 257)
    first.write(np.arange(100))
    first.release()
    with pytest.raises(DataError, match="is shorter than it was when it was last saved"):
        ShardWriter(tmp_path / "a.tokens", 257, keep_tokens=101)
