"""Runs the operations of a process group in the order of their issue, and tells who waits for them.

[Note: Who runs an operation] One operation of a group runs at a time, in order of issue: whoever holds the
turn runs the head of the queue. That is a thread of the executor, so that operations overlap with the
backward pass; or, if no thread has got to it yet, the caller who waits for it anyway, which saves two changes
of thread. An operation that could be *started* when it was issued (its contribution is on its way, see
``Operation.start``) needs no thread at all: peers have what they need of this rank, so it can lie until
somebody waits for it.

[Note: Callbacks] Callbacks of a future may issue operations and wait for them (torch's PowerSGD hook does),
so they run after the turn was handed on, and a thread that is about to run callbacks makes another one serve
the queue meanwhile.

Knows nothing of tensors, sockets and ranks.
"""

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

from torch.futures import Future

from gradsync.comm.work import PythonWork

_JOIN_S = 10.0


class Operation(Protocol):
    """One collective on this rank."""

    @property
    def name(self) -> str:
        """What to call it in messages."""

    def start(self) -> bool:
        """Do what can be done without waiting for anybody; True if peers then need nothing more of this "
        "rank."""

    def finish(self) -> None:
        """Do the rest, waiting for peers as needed."""


class Work(PythonWork):
    """An operation in the queue of an executor."""

    def __init__(self, executor: "Executor", operation: Operation, result: Any, inputs: Any) -> None:
        super().__init__(result)
        self.inputs = inputs  # only kept, until the operation has run
        self.operation = operation
        self.is_started = False
        self.is_run = False  # no longer in the queue
        self._executor = executor

    @property
    def name(self) -> str:  # type: ignore[override]
        """What to call the operation in messages."""
        return self.operation.name

    def is_completed(self) -> bool:
        """Whether the operation is over, well or badly."""
        if not self.is_finished:
            self._executor.attend()
        return self.is_finished

    def get_future(self) -> "Future[Any]":
        """A future of the result; its callbacks run on a thread of the group."""
        future = super().get_future()
        if not self.is_finished:
            self._executor.attend()
        return future

    def _wait(self, limit_s: float | None) -> None:
        self._executor.wait(self, limit_s)


class Executor:
    """The queue of a group, and the threads that serve it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: deque[Work] = deque()
        self._lock = threading.Lock()  # guards everything but the run of an operation; taken after the turn
        self._turn = threading.Lock()
        self._num_unstarted = 0
        self._is_served = False  # a thread is on its way through the queue and will not overlook anything in it
        self._num_idle = 0
        self._calls: SimpleQueue[bool] = SimpleQueue()  # to idle threads: look at the queue, or end
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, make: Callable[[], Operation], result: Any, inputs: Any, is_awaited: bool) -> Work:
        """Put an operation in the queue; ``make`` is called once its place in the order is fixed.

        ``is_awaited`` says that the caller waits for it at once, so that no thread needs to be woken.
        """
        with self._lock:
            work = Work(self, make(), result, inputs)
            work.is_started = self._num_unstarted == 0 and work.operation.start()
            self._queue.append(work)
            if not work.is_started:
                self._num_unstarted += 1
                if not is_awaited:
                    self._attend()
        return work

    def wait(self, work: Work, limit_s: float | None) -> None:
        """Wait for a work; without a limit of time by running it, if it is its turn."""
        if limit_s is None and self._turn.acquire(blocking=False):
            self._run_up_to(work)
        if not work.is_finished:
            self.attend()
            work.sleep(limit_s)

    def attend(self) -> None:
        """See that a thread serves the queue."""
        with self._lock:
            self._attend()

    def close(self) -> None:
        """End the threads. What is still in the queue has to fail by itself by now."""
        outcomes = []
        with self._turn:
            while self._queue:
                outcomes.append(self._run_head())
        with self._lock:
            self._is_closed = True
            threads, self._threads = self._threads, []
        for work, error in outcomes:
            work.complete(error)
            work.resolve()
        for _ in threads:
            self._calls.put(False)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _run_up_to(self, work: Work) -> None:
        outcomes = []
        try:
            while not work.is_run:
                outcomes.append(self._run_head())
        finally:
            self._turn.release()
        for each, error in outcomes:
            each.complete(error)
            each.resolve()

    def _run_head(self) -> tuple[Work, BaseException | None]:
        """Run the head of the queue. The caller has the turn; once it has passed it on it completes the work.

        In this order: who waits for the work and then issues another one finds the queue free.
        """
        work, error = self._queue[0], None
        try:
            work.operation.finish()
        except BaseException as caught:
            error = caught
        with self._lock:
            self._queue.popleft()
            work.is_run = True
            work.inputs = None
            self._num_unstarted -= not work.is_started
        return work, error

    def _attend(self) -> None:
        if self._is_served or self._is_closed:
            return
        self._is_served = True
        if self._num_idle:
            self._num_idle -= 1
            self._calls.put(True)
        else:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self) -> None:
        is_called = True
        while is_called:
            self._drain()
            is_called = self._calls.get()

    def _drain(self) -> None:
        """Run what is in the queue; returns with this thread counted as idle."""
        while True:
            with self._turn:
                with self._lock:
                    if not self._queue:
                        self._is_served = False
                        self._num_idle += 1
                        return
                work, error = self._run_head()
            work.complete(error)
            if work.has_future and not self._run_callbacks(work):
                return

    def _run_callbacks(self, work: Work) -> bool:
        """See [Note: Callbacks]. False if somebody else serves the queue by now, or nobody needs to."""
        with self._lock:
            self._is_served = False
            if self._queue:
                self._attend()
        work.resolve()
        with self._lock:
            if self._is_served or not self._queue:
                self._num_idle += 1
                return False
            self._is_served = True
            return True
