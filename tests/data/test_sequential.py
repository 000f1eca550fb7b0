"""The plain per-process token loader."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.data.sequential import SequentialTokenLoader
from gradsync.errors import ConfigError, DataError


@given(batch=st.integers(1, 3), length=st.integers(1, 4), world=st.integers(1, 3), spare=st.integers(0, 40))
def test_batches_are_where_they_should_be(batch: int, length: int, world: int, spare: int) -> None:
    per_rank = batch * length
    num_tokens = per_rank * world + 1 + spare
    rounds = (num_tokens - 1) // (per_rank * world)
    for rank in range(world):
        loader = SequentialTokenLoader(torch.arange(num_tokens), batch, length, rank, world)
        for step in range(2 * rounds + 1):
            start = rank * per_rank + (step % rounds) * per_rank * world
            inputs, targets = loader.next_batch()
            assert inputs.shape == targets.shape == (batch, length)
            assert inputs.flatten().tolist() == list(range(start, start + per_rank))
            assert torch.equal(targets, inputs + 1)


def test_too_few_tokens_are_refused_with_the_number_needed() -> None:
    SequentialTokenLoader(torch.arange(49), 4, 6, 0, 2)
    with pytest.raises(DataError, match=r"48 tokens are fewer than .* \(49 tokens\)"):
        SequentialTokenLoader(torch.arange(48), 4, 6, 0, 2)


def test_a_rank_beyond_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 2 is not one of 2 ranks"):
        SequentialTokenLoader(torch.arange(100), 1, 1, 2, 2)
