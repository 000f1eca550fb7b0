"""Requests to end a run early: from signals of this process, or from the launcher through a file.

A request is only noted here. The trainer puts it to the vote with the step's loss, so that all
ranks stop after the same step. Knows no process group.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType

STOP_WORD = "stop"
"""The file in which the launcher writes the name of a reason to stop."""

_EXIT_INTERRUPTED = 130


class StopReason(IntEnum):
    """Why a run is asked to end; the larger one wins where ranks differ."""

    NONE = 0
    INTERRUPT = 1
    TERMINATE = 2


class StopRequests:
    """What this rank has been asked so far."""

    def __init__(self, word_file: Path | None = None) -> None:
        self._reason = StopReason.NONE
        self._word_file = word_file

    @property
    def reason(self) -> StopReason:
        """The request so far; reading the launcher's file costs a microsecond."""
        if self._word_file is not None and self._reason is StopReason.NONE and self._word_file.exists():
            self._reason = StopReason[self._word_file.read_text()]
        return self._reason

    def ask(self, reason: StopReason) -> None:
        """Note a request."""
        self._reason = max(self._reason, reason)


@contextmanager
def listening(requests: StopRequests, repeat_s: float = 0.0) -> Iterator[None]:
    """Note SIGTERM, SIGHUP and SIGINT unless they are ignored; a second SIGINT ends the process at once.

    ``repeat_s``: a second SIGINT this soon is taken for the same one. torchrun hands on what the
    terminal has sent to all processes already.
    """
    handler = _Handler(requests, repeat_s)
    listened = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    handled = [number for number in listened if signal.getsignal(number) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        handled = []  # only the main thread may; a caller from elsewhere handles its signals itself
    previous = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


class _Handler:
    def __init__(self, requests: StopRequests, repeat_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = requests
        self._repeat_s = repeat_s
        self._clock = clock
        self._interrupted_s: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            self._requests.ask(StopReason.TERMINATE)
            return
        now = self._clock()
        if self._interrupted_s is not None and now - self._interrupted_s >= self._repeat_s:
            os._exit(_EXIT_INTERRUPTED)  # no clean-up: it may hang, and that is why one asks twice
        if self._interrupted_s is None:
            self._interrupted_s = now
        self._requests.ask(StopReason.INTERRUPT)
