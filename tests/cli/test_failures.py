"""Which of several ranks' failures is told, and how."""

import pytest

from gradsync.cli.failures import cause, describe, failure_of, keep_trace, record, recorded, silent_failure
from gradsync.errors import BackendError, ConfigError, DataError, StalledError
from gradsync.train.config import TrainConfig

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2345")


def test_a_users_error_is_its_message():
    failure = failure_of(1, DataError("no text"))
    assert (describe(failure, TrainConfig()), failure.exit_code) == ("no text", 1)
    assert failure_of(0, ConfigError("x")).exit_code == 2


def test_an_unexpected_error_names_rank_and_kind_and_keeps_the_traceback(tmp_path):
    config = TrainConfig(run=str(tmp_path))
    failure = failure_of(1, ZeroDivisionError("division by zero"))
    keep_trace(config, failure)
    text = describe(failure, config)
    assert text == f"rank 1: ZeroDivisionError: division by zero (traceback in {tmp_path / 'errors.log'})"
    assert "ZeroDivisionError" in (tmp_path / "errors.log").read_text()


def test_with_debug_the_traceback_is_shown():
    try:
        raise ValueError("inside")
    except ValueError as error:
        failure = failure_of(0, error)
    assert "Traceback (most recent call last)" in describe(failure, TrainConfig(debug=True))


def test_the_cause_is_told_and_not_what_the_others_noticed(tmp_path):
    record(tmp_path, failure_of(0, LOST))
    record(tmp_path, failure_of(1, ValueError("bad batch")))
    assert cause(recorded(tmp_path), 0, 1).message == "bad batch"


def test_of_several_causes_that_of_the_rank_that_ended_first_is_told(tmp_path):
    for rank in range(3):
        record(tmp_path, failure_of(rank, ValueError(f"of rank {rank}")))
    assert cause(recorded(tmp_path), 1, 1).message == "of rank 1"


def test_a_wrapped_aftermath_is_one():
    wrapped = RuntimeError("the pass failed")
    wrapped.__cause__ = LOST
    assert failure_of(0, wrapped).is_aftermath
    assert failure_of(0, BackendError("rank 1 is gone")).is_aftermath
    assert not failure_of(0, ValueError("bad batch")).is_aftermath
    stalled = StalledError("rank 1 does not answer")
    stalled.__cause__ = BackendError("given up")
    assert not failure_of(0, stalled).is_aftermath


def test_an_aftermath_is_told_where_there_is_no_cause(tmp_path):
    record(tmp_path, failure_of(0, BackendError("the ranks could not meet")))
    assert cause(recorded(tmp_path), 0, 1).message == "the ranks could not meet"


@pytest.mark.parametrize(("code", "text"), [(-9, "rank 1 was killed by SIGKILL"), (3, "rank 1 ended with exit code 3")])
def test_a_rank_that_left_no_word_is_told_by_its_exit_code(tmp_path, code, text):
    record(tmp_path, failure_of(0, LOST))
    assert cause(recorded(tmp_path), 1, code).message.startswith(text)
    assert silent_failure(1, code).exit_code == 1
