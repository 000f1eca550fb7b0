"""Degrees multiply to the number of processes."""

import pytest

from gradsync.errors import ConfigError
from gradsync.parallel.degrees import Degrees, check_strategy, resolve_degrees


def test_replicas_are_what_the_others_leave():
    assert resolve_degrees(8, None, 2, 2) == Degrees(2, 2, 2)
    assert resolve_degrees(6, 3, 2, 1) == Degrees(3, 2, 1)
    assert Degrees(3, 2, 4).world == 24


@pytest.mark.parametrize(("world", "given"), [(3, (None, 2, 1)), (4, (4, 2, 1)), (4, (1, 2, 1)), (1, (None, 1, 2))])
def test_what_does_not_multiply_is_refused(world, given):
    with pytest.raises(ConfigError, match=f"and there (is|are) {world}$"):
        resolve_degrees(world, *given)


def test_ranks_that_share_a_replica_see_the_same_data():
    degrees = Degrees(data=2, tensor=2, pipeline=2)
    assert [degrees.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_zero_needs_whole_replicas():
    check_strategy("zero", Degrees(4))
    check_strategy("fsdp", Degrees(2, 2))
    with pytest.raises(ConfigError, match="--strategy fsdp"):
        check_strategy("zero", Degrees(2, 2))
