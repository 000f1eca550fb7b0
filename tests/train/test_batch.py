"""The division of a step: exact for whatever is accepted, the nearest values named for whatever isn't."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.errors import ConfigError
from gradsync.train.batch import choose_num_processes, largest_divisor, plan_batch

small = st.integers(1, 12)


@given(small, small, small, small)
def test_every_sequence_is_in_exactly_one_micro_batch(context, world, micro_batches, limit):
    plan = plan_batch(context * world * micro_batches, context, world, None, limit)
    assert plan.micro_batch * plan.accumulation * world == plan.sequences_per_step == world * micro_batches
    assert plan.tokens_per_step == context * world * micro_batches
    assert plan.micro_batch <= limit


def test_a_given_micro_batch_is_taken():
    plan = plan_batch(2048, 128, 2, 4, 16)
    assert (plan.micro_batch, plan.accumulation) == (4, 2)


@pytest.mark.parametrize(
    ("tokens", "world", "micro_batch", "nearest"),
    [
        (1000, 2, None, "768 or 1024"),
        (2048, 3, None, "1920 or 2304"),
        (2048, 2, 3, "1536 or 2304"),
        (5, 1, None, "128"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_values(tokens, world, micro_batch, nearest):
    with pytest.raises(ConfigError) as caught:
        plan_batch(tokens, 128, world, micro_batch, 16)
    assert str(caught.value).endswith(f"the nearest values that do: {nearest}")
    for value in map(int, nearest.split(" or ")):
        assert plan_batch(value, 128, world, micro_batch, 16)


@given(st.integers(1, 200), st.integers(1, 20))
def test_the_largest_divisor_divides_and_no_larger_one_does(number, limit):
    found = largest_divisor(number, limit)
    assert number % found == 0
    assert not any(number % larger == 0 for larger in range(found + 1, min(number, limit) + 1))


def test_processes_are_chosen_so_that_the_step_divides():
    assert choose_num_processes(16 * 128, 128, None, available=6) == 4
    assert choose_num_processes(16 * 128, 128, 16, available=6) == 1
    assert choose_num_processes(100, 128, None, available=6) == 1
