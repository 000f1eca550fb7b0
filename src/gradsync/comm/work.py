"""The work object that an asynchronous operation of a Python process group returns."""

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from gradsync.errors import BackendError

SLICE = timedelta(seconds=0.2)
"""How long a wait lasts that cannot be interrupted, before the next look whether it still makes sense."""

_futures_lock = threading.Lock()


def is_over_within(work: Any, limit: timedelta) -> bool:
    """Whether a work ends within a while, well or badly; for those that a wait with a limit leaves as they are."""
    try:
        work.wait(limit)
    except RuntimeError:
        return bool(work.is_completed())
    return True


class PythonWork(dist.Work):
    """An operation that somebody completes, on this or another thread."""

    name = "an operation"

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.is_finished = False
        self.error: BaseException | None = None
        self._result = result
        self._done = threading.Lock()
        self._done.acquire()
        self._source: Future[Any] | None = None  # is completed, once
        self._future: Future[Any] | None = None  # what the caller sees of it

    # -- for the caller

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is complete.

        Raises:
            BackendError: the operation failed, or is not complete after ``timeout`` (then it goes on).
        """
        if not self.is_finished:
            limit_s = timeout.total_seconds() if timeout is not None else 0.0
            self._wait(limit_s if limit_s > 0 else None)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Whether the operation is over, well or badly."""
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

    def source_rank(self) -> int:
        """The rank that a message came from."""
        raise BackendError(f"{self.name} has no source rank; only a message that was received has one")

    _source_rank = source_rank

    def get_future(self) -> "Future[Any]":
        """A future of the result; its callbacks run on a thread of the group."""
        with _futures_lock:
            if self._future is None:
                self._source = Future()
                self._future = self._source.then(_outcome)
            future = self._future
        if self.is_finished:
            self.resolve()
        return future

    # -- for whoever runs the operation

    @property
    def has_future(self) -> bool:
        """Whether somebody may have registered callbacks."""
        return self._future is not None

    def complete(self, error: BaseException | None = None) -> None:
        """End the operation; ``resolve`` has to follow."""
        self.error = error
        self.is_finished = True
        self._done.release()

    def resolve(self) -> None:
        """Complete the future, if there is one, and run its callbacks."""
        if self._source is None:  # who asks for a future after this sees that the operation is over
            return
        with _futures_lock:
            source, self._source = self._source, None
        if source is not None:
            source.set_result((self.error, self._result))

    def sleep(self, limit_s: float | None) -> None:
        """Sleep until the operation is over, at most ``limit_s``."""
        if not self._done.acquire(timeout=-1 if limit_s is None else limit_s):
            raise BackendError(
                f"{self.name} is not complete after the {limit_s:g} s that its caller gave it; it goes on "
                "until the timeout of its group"
            )
        self._done.release()  # for the next one who waits

    def _wait(self, limit_s: float | None) -> None:
        self.sleep(limit_s)


def _outcome(future: "Future[Any]") -> Any:
    # An exception that is *set* on a torch future is invisible to C++ (torch's own reducer); a raised one is
    # not.
    error, result = future.value()
    if error is not None:
        raise error
    return result
