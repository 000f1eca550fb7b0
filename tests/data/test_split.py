"""Which part is for validation: pure rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.data.split import choose_files, cut_at_end, is_validation_record

_fractions = st.floats(0.001, 0.99)


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60), fraction=st.floats(0, 0.99))
def test_chosen_files_fit_into_the_share(sizes: list[int], fraction: float) -> None:
    names = [f"file{i}" for i in range(len(sizes))]
    chosen = choose_files(names, sizes, fraction)
    assert sum(sizes[i] for i in chosen) <= round(sum(sizes) * fraction)


def test_the_choice_of_files_does_not_depend_on_their_order() -> None:
    names = [f"file{i}" for i in range(100)]
    chosen = {names[i] for i in choose_files(names, [10] * 100, 0.1)}
    backwards = names[::-1]
    assert {backwards[i] for i in choose_files(backwards, [10] * 100, 0.1)} == chosen
    assert len(chosen) == 10


@given(fraction=_fractions, number=st.integers(100, 3000))
def test_records_are_taken_in_the_share_asked_for(fraction: float, number: int) -> None:
    taken = sum(is_validation_record(i, fraction) for i in range(number))
    # One of every stratum, so the count is off by the two strata at the ends at most.
    assert abs(taken - number * fraction) <= 2


def test_records_are_not_taken_at_even_distances() -> None:
    taken = [i for i in range(2000) if is_validation_record(i, 0.05)]
    assert len({i % 20 for i in taken}) > 10


def test_no_share_takes_no_record() -> None:
    assert not any(is_validation_record(i, 0.0) for i in range(1000))


@pytest.mark.parametrize(("size", "fraction", "cut"), [(100, 0.05, 95), (100, 0.0, 100), (3, 0.1, 3)])
def test_the_cut_at_the_end(size: int, fraction: float, cut: int) -> None:
    assert cut_at_end(size, fraction) == cut
