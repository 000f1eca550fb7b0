"""Who is named as the odd one out, and what as the likely cause."""

import re

import pytest

from gradsync.comm.diagnosis import HAS_ENDED, diagnose, odd_ones
from gradsync.comm.ledger import BEFORE_FIRST_PASS, Place

WAITING = Place(4, "backward", 1, 3.0, "", ("train.py:9 in step: loss.backward()",))


def elsewhere(*stack: str) -> Place:
    return Place(3, "between passes", None, None, "", stack)


@pytest.mark.parametrize(
    ("stack", "cause"),
    [
        (("train.py:4 in main: next(it)", "dataloader.py:700 in _next_data: x"), "its data loader has no batch ready"),
        (("train.py:4 in load_batch: time.sleep(9)",), "its data loader has no batch ready"),
        (("train.py:30 in evaluate: model(x)",), "it evaluates while the others train"),
        (("train.py:8 in main: dist.barrier()", "distributed_c10d.py:99 in barrier: work.wait()"), r"\(barrier\)"),
        (("train.py:8 in save_checkpoint: torch.save(x)",), "it is saving"),
        (("train.py:8 in main: time.sleep(9)",), r"busy elsewhere \(train.py:8"),
        ((), "busy elsewhere"),
    ],
)
def test_the_place_of_the_odd_one_tells_the_cause(stack: tuple[str, ...], cause: str) -> None:
    text = diagnose([0, 1, 2], {0: WAITING, 1: elsewhere(*stack), 2: WAITING}, {}, 3.0, 0)
    assert "the odd one out is rank 1" in text
    assert re.search(cause, text), text


def test_every_rank_is_listed_with_its_place_and_stack() -> None:
    text = diagnose([0, 1], {0: WAITING, 1: elsewhere("a.py:1 in f: g()")}, {}, 3.0, 0)
    assert "rank 0 has waited 3.0 s for other ranks, and the soft limit is 3 s" in text
    assert "rank 0: pass 4, backward, bucket 1 (waiting for 3.0 s)" in text
    assert "train.py:9 in step: loss.backward()" in text
    assert "rank 1: pass 3, between passes" in text
    assert "a.py:1 in f: g()" in text


def test_who_does_not_answer_and_who_has_left() -> None:
    assert odd_ones([0, 1], {0: WAITING}, {})[0] == [1]
    assert "it was killed, is stopped" in odd_ones([0, 1], {0: WAITING}, {})[1]
    odd, cause = odd_ones([0, 1], {0: WAITING}, {1: HAS_ENDED})
    assert odd == [1] and "ddp.join()" in cause


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (Place(5, "backward", 1, 3.0), "pass 5"),
        (Place(4, "forward", 1, 3.0), "phase forward"),
        (Place(4, "backward", 2, 3.0), "bucket 2"),
    ],
)
def test_if_all_wait_the_one_in_another_place_is_odd(other: Place, what: str) -> None:
    odd, cause = odd_ones([0, 1, 2], {0: WAITING, 1: other, 2: WAITING}, {})
    assert odd == [1]
    assert what in cause and "skipped a backward" in cause


def test_a_collective_of_ones_own_is_odd_where_the_others_are_in_the_engine() -> None:
    alone = Place(4, "backward", None, 3.0, "", ("train.py:8 in main: dist.barrier()",), collective="barrier")
    odd, cause = odd_ones([0, 1, 2], {0: WAITING, 1: WAITING, 2: alone}, {})
    assert odd == [2]
    assert "it is in a collective that the others did not issue (barrier)" in cause


def test_ranks_that_wait_in_different_groups_are_not_told_apart_by_their_passes() -> None:
    exchange = Place(7, "forward", None, 3.0, loop="step 2", collective="recv")
    reduction = Place(9, "backward", 1, 3.0, loop="step 2")
    odd, cause = odd_ones([0, 1, 2], {0: reduction, 1: exchange, 2: exchange}, {}, True)
    assert odd == [] and "none of them is late" in cause
    behind = Place(9, "backward", 1, 3.0, loop="step 1")
    assert odd_ones([0, 1, 2], {0: behind, 1: exchange, 2: exchange}, {}, True)[0] == [0]


def test_a_loop_that_tells_its_step_is_quoted() -> None:
    stage = Place(0, BEFORE_FIRST_PASS, waited_s=3.0, loop="step 7, forward and backward", collective="recv")
    late = Place(0, BEFORE_FIRST_PASS, stack=("loader.py:3 in next_step: x",), loop="step 7, data")
    text = diagnose([0, 1], {0: stage, 1: late}, {}, 3.0, 0)
    assert "rank 0: step 7, forward and backward (waiting in recv for 3.0 s)" in text
    assert "rank 1: step 7, data\n" in text
    assert "the odd one out is rank 1: its data loader has no batch ready" in text


def test_if_all_wait_in_collectives_the_step_tells_them_apart_or_nothing_does() -> None:
    here = Place(0, BEFORE_FIRST_PASS, waited_s=3.0, loop="step 7, data", collective="recv")
    there = Place(0, BEFORE_FIRST_PASS, waited_s=3.0, loop="step 8, data", collective="recv")
    assert odd_ones([0, 1, 2], {0: here, 1: here, 2: there}, {})[0] == [2]
    odd, cause = odd_ones([0, 1], {0: here, 1: here}, {})
    assert odd == [] and "compare the stacks" in cause


def test_if_all_wait_in_the_same_place_nobody_is_blamed() -> None:
    odd, cause = odd_ones([0, 1], {0: WAITING, 1: WAITING}, {})
    assert odd == [] and "network" in cause


def test_if_all_that_are_there_wait_and_one_has_ended_it_is_that_one() -> None:
    here = Place(0, BEFORE_FIRST_PASS, waited_s=3.0, loop="step 7, data", collective="all_reduce")
    odd, cause = odd_ones([0, 1], {0: here, 1: here}, {2: HAS_ENDED})
    assert odd == [2] and "it has left its loop and ended" in cause


def test_an_exception_in_a_thread_is_told_with_the_place_of_its_rank() -> None:
    late = Place(3, "between passes", stack=("loader.py:3 in next: queue.get()",), mishap="ValueError: no such file")
    text = diagnose([0, 1], {0: WAITING, 1: late}, {}, 3.0, 0)
    assert "rank 1: pass 3, between passes; a thread has ended with ValueError: no such file\n" in text
    assert "the odd one out is rank 1: a thread of it has ended with ValueError: no such file, and" in text
