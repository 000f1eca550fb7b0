"""Point-to-point messages of an MPI group: send, receive, receive from anybody.

A message is on its way as soon as it is issued. While any is under way a thread keeps MPI moving (see
[Note: Polling] in ``mpi_requests``); whoever waits for one looks after it as well, which is quicker.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from gradsync.comm.mpi_requests import SPIN_S, keep_forever
from gradsync.comm.work import PythonWork
from gradsync.errors import BackendError, GradsyncError

_PAUSE_S = 50e-6
_JOIN_S = 10.0


class MessageWork(PythonWork):
    """A message that is sent or received."""

    def __init__(self, messages: "Messages", name: str, result: Any, request: Any, kept: Any, timeout_s: float) -> None:
        super().__init__(result)
        self.name = name
        self.request = request
        self.kept = kept
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.after: Callable[[], None] | None = None  # what is left to do once the data is there
        self.source: int | None = None
        self._messages = messages

    def is_completed(self) -> bool:
        """Whether the message has arrived, or is out of this rank's hands; also if it failed."""
        self._messages.look_after(self)
        return self.is_finished

    def source_rank(self) -> int:
        """The rank that a message came from."""
        return super().source_rank() if self.source is None else self.source

    _source_rank = source_rank

    def _wait(self, limit_s: float | None) -> None:
        spin_until = time.monotonic() + SPIN_S
        while time.monotonic() < spin_until:
            self._messages.look_after(self)
            if self.is_finished:
                return
            os.sched_yield()
        self.sleep(limit_s)


class Messages:
    """The messages of one group that are under way."""

    def __init__(self, fail: Callable[[str], GradsyncError]) -> None:
        self._fail = fail
        self._pending: list[MessageWork] = []
        self._lock = threading.Lock()  # guards the list, and the requests in it
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._given_up: GradsyncError | None = None

    def give_up(self, reason: GradsyncError) -> None:
        """Have what is under way, and what comes after, fail for this reason."""
        self._given_up = reason

    def add(self, work: MessageWork) -> MessageWork:
        """Look after a message from now on."""
        with self._lock:
            self._pending.append(work)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._serve, name="gradsync-mpi-messages", daemon=True)
                self._thread.start()
        return work

    def look_after(self, work: MessageWork) -> None:
        """See whether a message has arrived."""
        with self._lock:
            is_over = work in self._pending and self._try(work)
        if is_over:
            work.resolve()

    def close(self) -> None:
        """End the thread; what is under way fails."""
        with self._lock:
            self._is_closed = True
            lost, self._pending = self._pending, []
            thread = self._thread
        for work in lost:
            keep_forever(work.request, work.kept)
            work.complete(BackendError(f"{work.name} was under way when its group was left"))
            work.resolve()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _serve(self) -> None:
        while True:
            with self._lock:
                over = [work for work in list(self._pending) if self._try(work)]
                if not self._pending:
                    self._thread = None
            for work in over:
                work.resolve()
            if self._thread is not threading.current_thread():
                return
            time.sleep(_PAUSE_S)

    def _try(self, work: MessageWork) -> bool:
        """Complete a message if it has arrived or failed; the lock is held."""
        error: BaseException | None = None
        status = MPI.Status()
        try:
            if work.request.Test(status):
                work.source = status.Get_source()
                if work.after is not None:
                    work.after()
            elif self._given_up is not None:
                error = self._given_up
                keep_forever(work.request, work.kept)
            elif time.monotonic() > work.deadline:
                error = self._fail(f"{work.name} timed out after {work.timeout_s:g} s: the other side did not come")
                keep_forever(work.request, work.kept)
            else:
                return False
        except MPI.Exception as caught:
            error = self._fail(f"{work.name} failed: {caught}")
        self._pending.remove(work)
        work.complete(error)
        return True
