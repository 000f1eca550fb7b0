"""Runs the operations of a process group in the order of their issue, and tells who waits for them.

[Note: Who runs an operation] One operation of a group runs at a time, in order of issue: whoever holds the turn
runs the head of the queue. That is a thread of the executor, so that operations overlap with the backward pass;
or, if no thread has got to it yet, the caller who waits for it anyway, which saves two changes of thread. An
operation that could be *started* when it was issued (its contribution is on its way, see ``Operation.start``)
needs no thread at all: peers have what they need of this rank, so it can lie until somebody waits for it.

[Note: Callbacks] Callbacks of a future may issue operations and wait for them (torch's PowerSGD hook does), so
they run after the turn was handed on, and a thread that is about to run callbacks makes another one serve the
queue meanwhile.

Knows nothing of tensors, sockets and ranks.
"""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch.distributed as dist
from torch.futures import Future

from gradsync.errors import BackendError

_JOIN_S = 10.0


class Operation(Protocol):
    """One collective on this rank."""

    name: str

    def start(self) -> bool:
        """Do what can be done without waiting for anybody; True if peers then need nothing more of this rank."""

    def finish(self) -> None:
        """Do the rest, waiting for peers as needed."""


class Work(dist.Work):
    """What the caller of an asynchronous operation holds."""

    def __init__(self, executor: "Executor", operation: Operation, result: Any) -> None:
        super().__init__()
        self.operation = operation
        self.is_started = False
        self.is_finished = False
        self.error: BaseException | None = None
        self._executor = executor
        self._result = result
        self._done = threading.Lock()
        self._done.acquire()
        self.source_future: Future[Any] | None = None  # completed by the executor, exactly once
        self.future: Future[Any] | None = None  # what the caller sees of it

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is complete.

        Raises:
            BackendError: the operation failed, or is not complete after ``timeout`` (then it goes on).
        """
        if not self.is_finished:
            limit_s = timeout.total_seconds() if timeout is not None else 0.0
            self._executor.wait(self, limit_s if limit_s > 0 else None)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Whether the operation is over, well or badly."""
        if not self.is_finished:
            self._executor.attend()
        return self.is_finished

    def is_success(self) -> bool:
        """Whether the operation has ended well."""
        return self.is_finished and self.error is None

    def exception(self) -> BaseException | None:
        """Why the operation failed, if it did."""
        return self.error

    def result(self) -> Any:
        """The tensors that the operation writes."""
        return self._result

    def synchronize(self) -> None:
        """The same as ``wait``: on a CPU there is no stream that could run ahead."""
        self.wait()

    def get_future(self) -> "Future[Any]":
        """A future of the result; its callbacks run on a thread of the group."""
        return self._executor.future_of(self)

    # -- for the executor

    def run(self) -> None:
        """Run the operation to its end."""
        try:
            self.operation.finish()
        except BaseException as error:
            self.error = error
        self.is_finished = True
        self._done.release()

    def sleep(self, limit_s: float | None) -> bool:
        """Sleep until the operation is over; False if it is not after ``limit_s``."""
        is_over = self._done.acquire(timeout=-1 if limit_s is None else limit_s)
        if is_over:
            self._done.release()  # for the next one who waits
        return is_over


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

    def submit(self, make: Callable[[], Operation], result: Any, is_awaited: bool) -> Work:
        """Put an operation in the queue; ``make`` is called once its place in the order is fixed.

        ``is_awaited`` says that the caller waits for it at once, so that no thread needs to be woken.
        """
        with self._lock:
            work = Work(self, make(), result)
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
            if not work.sleep(limit_s):
                raise BackendError(
                    f"{work.operation.name} is not complete after the {limit_s:g} s that its caller gave it; "
                    "it goes on until the timeout of its group"
                )

    def attend(self) -> None:
        """See that a thread serves the queue."""
        with self._lock:
            self._attend()

    def future_of(self, work: Work) -> "Future[Any]":
        """The future of a work."""
        with self._lock:
            if work.future is None:
                work.source_future = Future()
                work.future = work.source_future.then(_outcome)
            future = work.future
            if not work.is_finished:
                self._attend()
        if work.is_finished:
            self._resolve(work)
        return future

    def close(self) -> None:
        """End the threads. What is still in the queue has to fail by itself by now."""
        with self._turn:
            while self._queue:
                self._run_head()
        with self._lock:
            self._is_closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._calls.put(False)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _run_up_to(self, work: Work) -> None:
        finished = []
        try:
            while not work.is_finished:
                finished.append(self._run_head())
        finally:
            self._turn.release()
        for each in finished:
            self._resolve(each)

    def _run_head(self) -> Work:
        """Run the head of the queue. The caller has the turn."""
        work = self._queue[0]
        work.run()
        with self._lock:
            self._queue.popleft()
            self._num_unstarted -= not work.is_started
        return work

    def _resolve(self, work: Work) -> None:
        with self._lock:
            future, work.source_future = work.source_future, None
        if future is not None:
            future.set_result((work.error, work.result()))

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
                work = self._run_head()
            if work.future is not None and not self._run_callbacks(work):
                return

    def _run_callbacks(self, work: Work) -> bool:
        """See [Note: Callbacks]. False if somebody else serves the queue by now, or nobody needs to."""
        with self._lock:
            self._is_served = False
            if self._queue:
                self._attend()
        self._resolve(work)
        with self._lock:
            if self._is_served or not self._queue:
                self._num_idle += 1
                return False
            self._is_served = True
            return True


def _outcome(future: "Future[Any]") -> Any:
    # An exception that is *set* on a torch future is invisible to C++ (torch's own reducer); a raised one is not.
    error, result = future.value()
    if error is not None:
        raise error
    return result
