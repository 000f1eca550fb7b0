"""Requests to stop: from signals of this process and from the launcher's file."""

import os
import signal

import pytest

from gradsync.train import interrupt
from gradsync.train.interrupt import StopReason, StopRequests, listening


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGINT, StopReason.INTERRUPT), (signal.SIGTERM, StopReason.TERMINATE)]
)
def test_a_signal_is_noted_and_the_handler_put_back(number, reason):
    before = signal.getsignal(number)
    requests = StopRequests()
    with listening(requests):
        os.kill(os.getpid(), number)
        assert requests.reason is reason
    assert signal.getsignal(number) is before


def test_handlers_are_put_back_after_an_exception():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="inside"), listening(StopRequests()):
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        requests = StopRequests()
        with listening(requests):
            os.kill(os.getpid(), signal.SIGINT)
        assert requests.reason is StopReason.NONE
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def exits(monkeypatch):
    codes: list[int] = []
    monkeypatch.setattr(interrupt.os, "_exit", codes.append)
    return codes


def test_the_second_interrupt_ends_the_process(exits):
    handler = interrupt._Handler(StopRequests(), repeat_s=0.0)
    handler(signal.SIGINT, None)
    assert exits == []
    handler(signal.SIGINT, None)
    assert exits == [130]


def test_an_interrupt_that_arrives_twice_counts_once(exits):
    now = [0.0]
    handler = interrupt._Handler(StopRequests(), repeat_s=1.0, clock=lambda: now[0])
    handler(signal.SIGINT, None)
    now[0] = 0.5
    handler(signal.SIGINT, None)
    assert exits == []
    now[0] = 1.5
    handler(signal.SIGINT, None)
    assert exits == [130]


def test_the_launchers_word_is_read_from_its_file(tmp_path):
    requests = StopRequests(tmp_path / "stop")
    assert requests.reason is StopReason.NONE
    (tmp_path / "stop").write_text("TERMINATE")
    assert requests.reason is StopReason.TERMINATE
