"""Validation batches: every token predicted once, whatever the number of ranks."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.data.batch import IGNORED_TARGET
from gradsync.data.evaluation import evaluation_batches
from gradsync.data.source import TokenSource
from gradsync.errors import DataError

_SHARD_STRIDE = 1000


def _source(*lengths: int) -> TokenSource:
    shards = [np.arange(n, dtype=np.uint32) + _SHARD_STRIDE * i for i, n in enumerate(lengths)]
    return TokenSource(shards, "the test text")


def _pairs(source: TokenSource, world: int, **options: int | None) -> list[tuple[int, int]]:
    """Input and target of everything that counts, over all ranks."""
    pairs = []
    for rank in range(world):
        for inputs, targets in evaluation_batches(source, rank=rank, world=world, **options):  # type: ignore[arg-type]
            counted = targets != IGNORED_TARGET
            pairs += list(zip(inputs[counted].tolist(), targets[counted].tolist(), strict=True))
    return pairs


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(lambda n: max(n) > 1),
    context=st.integers(1, 9),
    micro_batch=st.integers(1, 4),
    world=st.integers(1, 5),
)
def test_every_token_is_predicted_once(lengths: list[int], context: int, micro_batch: int, world: int) -> None:
    pairs = _pairs(_source(*lengths), world, context=context, micro_batch=micro_batch)
    expected = [(_SHARD_STRIDE * i + k, _SHARD_STRIDE * i + k + 1) for i, n in enumerate(lengths) for k in range(n - 1)]
    assert Counter(pairs) == Counter(expected)


@given(world=st.integers(1, 5), micro_batch=st.integers(1, 3), limit=st.integers(1, 12))
def test_a_limit_takes_the_same_windows_for_any_number_of_ranks(world: int, micro_batch: int, limit: int) -> None:
    source = _source(43)
    alone = _pairs(source, 1, context=4, micro_batch=1, max_sequences=limit)
    assert Counter(_pairs(source, world, context=4, micro_batch=micro_batch, max_sequences=limit)) == Counter(alone)
    assert len({first // 4 for first, _ in alone}) == min(limit, 11)


def test_a_limit_spreads_over_the_text() -> None:
    pairs = _pairs(_source(401), 1, context=4, micro_batch=1, max_sequences=4)
    assert [first for first, _ in pairs if first % 4 == 0] == [0, 100, 200, 300]


@given(length=st.integers(2, 60), micro_batch=st.integers(1, 4), world=st.integers(1, 5))
def test_all_ranks_get_the_same_number_of_batches(length: int, micro_batch: int, world: int) -> None:
    numbers = {len(list(evaluation_batches(_source(length), 4, rank, world, micro_batch))) for rank in range(world)}
    assert len(numbers) == 1


def test_padding_is_a_valid_input() -> None:
    ((inputs, targets),) = evaluation_batches(_source(4), 8, 0, 1, 1)
    assert inputs.tolist() == [[0, 1, 2, 3, 0, 0, 0, 0]]
    assert targets.tolist() == [[1, 2, 3, -1, -1, -1, -1, -1]]


@pytest.mark.parametrize("length", [0, 1])
def test_a_split_without_a_target_is_refused(length: int) -> None:
    with pytest.raises(DataError, match=rf"the test text has {length} tokens; evaluation needs at least 2"):
        next(evaluation_batches(_source(length), 4, 0, 1, 1))
