"""Who is named as the odd one out, and what as the likely cause."""

import re

import pytest

from gradsync.comm.diagnosis import diagnose, odd_ones
from gradsync.comm.ledger import Place

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
    text = diagnose([0, 1, 2], {0: WAITING, 1: elsewhere(*stack), 2: WAITING}, [], 3.0, 0)
    assert "the odd one out is rank 1" in text
    assert re.search(cause, text), text


def test_every_rank_is_listed_with_its_place_and_stack() -> None:
    text = diagnose([0, 1], {0: WAITING, 1: elsewhere("a.py:1 in f: g()")}, [], 3.0, 0)
    assert "rank 0 has waited 3.0 s for other ranks, and the soft limit is 3 s" in text
    assert "rank 0: pass 4, backward, bucket 1 (waiting for 3.0 s)" in text
    assert "train.py:9 in step: loss.backward()" in text
    assert "rank 1: pass 3, between passes" in text
    assert "a.py:1 in f: g()" in text


def test_who_does_not_answer_and_who_has_left() -> None:
    assert odd_ones([0, 1], {0: WAITING}, [])[0] == [1]
    assert "it was killed, is stopped" in odd_ones([0, 1], {0: WAITING}, [])[1]
    odd, cause = odd_ones([0, 1], {0: WAITING}, [1])
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
    odd, cause = odd_ones([0, 1, 2], {0: WAITING, 1: other, 2: WAITING}, [])
    assert odd == [1]
    assert what in cause and "skipped a backward" in cause


def test_if_all_wait_in_the_same_place_nobody_is_blamed() -> None:
    odd, cause = odd_ones([0, 1], {0: WAITING, 1: WAITING}, [])
    assert odd == [] and "network" in cause
