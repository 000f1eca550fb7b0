"""Waiting for other ranks: watched, and with an end.

``Waits`` is how one user of a group waits for its works; the watch reads it from its thread and leaves the error that
ends the wait. What a work is comes in three kinds: those of gloo's collectives, which can be waited for in slices of
time; those of groups written in Python, which the watch can end; and what stands for a wait of another kind (a
thread, a future, notices in the store), which is ``Cuttable`` as well.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from gradsync.comm.ledger import Place
from gradsync.comm.other_wait import STRICT_ANSWER_LIMITS, give_up
from gradsync.comm.watch import Watch
from gradsync.comm.watches import watch_of_world
from gradsync.comm.work import SLICE, is_over_within
from gradsync.errors import GradsyncError

T = TypeVar("T")


class Waits:
    """How one engine waits for the works of its group; without a group, for all ranks of the watch."""

    is_strict = True
    answer_limits = STRICT_ANSWER_LIMITS

    def __init__(self, group: Any, watch: Watch | None, limit_s: float | None) -> None:
        if group is not None and group not in dist.distributed_c10d._world.pg_map:
            watch = None  # one that torch does not know: its ranks have no numbers
        self._group = group
        self._watch = watch
        self._is_sliced = watch is not None and can_be_sliced(group)
        self.limit_s = limit_s if limit_s is not None else watch.soft_limit_s if watch is not None else 0.0
        self.members: list[int] = [] if watch is None else _ranks_of(group, watch)
        self.thread: int | None = None
        """The thread of this process for whose end this rank waits, if it is that."""
        self.since_s = 0.0
        self.patient_until_s = 0.0
        """Until when the others may take their time, by what they have answered."""

    def enter(self, phase: str, step: int) -> None:
        """Note what this rank begins to do."""
        if self._watch is not None:
            self._watch.phase, self._watch.step = phase, step

    def check(self) -> None:
        """Raise if the ranks are known to have lost each other."""
        if self._watch is not None and self._watch.error is not None:
            raise self._watch.raised()

    def wait(self, work: Any, bucket: int | None = None) -> None:
        """Wait for a work.

        Raises:
            RankFailedError: another rank has failed or is gone; the message has its error.
            StalledError: it took longer than the soft limit; the message says where all ranks are.
        """
        watch = self._watch
        if watch is None:
            work.wait()
            return
        if watch.error is not None:
            raise watch.raised()
        self.since_s = time.monotonic()
        self.patient_until_s = 0.0
        watch.bucket = bucket
        watch.waiting = self
        try:
            if isinstance(work, Cuttable) or (self._is_sliced and hasattr(work, "is_completed")):
                self._wait_in_slices(work, watch)
            else:
                work.wait()
        except (GradsyncError, RuntimeError) as error:
            watch.waiting = None
            explained = self.explain(error)
            if explained is error:
                raise
            raise explained from None if explained.args == error.args else error
        finally:
            watch.waiting = None
            watch.bucket = None

    def wait_for_messages(self, works: Sequence[Any]) -> None:
        """Wait for works some of which may be messages from rank to rank, which gloo cannot wait for in slices."""
        if self._is_sliced and works:
            self.beside(lambda: _wait_for_all(works))
        else:
            for work in works:
                self.wait(work)

    def beside(self, action: Callable[[], T]) -> T:
        """Return what an action returns that waits for other ranks and knows no end; see ``wait`` for what it raises.

        It runs on another thread, which is left to itself if this rank need not wait any more.
        """
        if self._watch is None:
            return action()
        call = _Call(action)
        self.thread = call.thread
        try:
            self.wait(call)
        finally:
            self.thread = None
        return call.result  # type: ignore[no-any-return]

    def explain(self, error: BaseException) -> BaseException:
        """Return the error of the rank that is behind this one, if there is such a rank."""
        return error if self._watch is None else self._watch.behind(error, self.members)

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error of the rank that is behind this one, if it has told it."""
        if self._watch is None:
            return error
        return self._watch.explain(error, ())

    def patience_with(self, places: Mapping[int, Place]) -> float:
        """Return how long to wait before asking again: who is asked for has no time to lose."""
        return 0.0

    def interrupt(self, error: GradsyncError) -> None:
        """End a wait in one piece; see ``watch``, [Note: Ending a wait]."""
        give_up(self._group, error)

    def forget(self) -> None:
        """Forget an error, because the ranks have agreed to go on."""
        if self._watch is not None:
            self._watch.forget()

    @staticmethod
    def _wait_in_slices(work: Any, watch: Watch) -> None:
        while not is_over_within(work, SLICE):
            if watch.error is not None:
                raise watch.raised()
        work.wait()


class Cuttable:
    """Looks like a work, and may be waited for in slices whatever the group."""

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait until it is over; with a limit, raise RuntimeError if it is not by then."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Whether it is over, well or badly."""
        raise NotImplementedError


class FutureEnd(Cuttable):
    """A future of somebody else's; with ``limit_s`` it is over then, and ``wait`` raises what ``late`` returns."""

    def __init__(self, future: Any, limit_s: float | None = None, late: Callable[[], Exception] | None = None) -> None:
        self._arrived = threading.Event()
        self._until_s = None if limit_s is None else time.monotonic() + limit_s
        self._late = late
        future.add_done_callback(lambda _: self._arrived.set())

    def wait(self, limit: timedelta | None = None) -> None:
        """See ``Cuttable``."""
        if self._arrived.wait(self._left_s(limit)):
            return
        if self._late is not None and self._is_late():
            raise self._late()
        raise RuntimeError("the future is not complete")

    def is_completed(self) -> bool:
        """See ``Cuttable``."""
        return self._arrived.is_set() or self._is_late()

    def _left_s(self, limit: timedelta | None) -> float | None:
        limits_s = [] if limit is None else [limit.total_seconds()]
        if self._until_s is not None:
            limits_s.append(max(self._until_s - time.monotonic(), 0.0))
        return min(limits_s, default=None)

    def _is_late(self) -> bool:
        return self._until_s is not None and time.monotonic() >= self._until_s


class _ThreadEnd(Cuttable):
    """The end of a thread."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def wait(self, limit: timedelta | None = None) -> None:
        self._thread.join(None if limit is None else limit.total_seconds())
        if self._thread.is_alive():
            raise RuntimeError("the thread is still running")

    def is_completed(self) -> bool:
        return not self._thread.is_alive()


class _Call(Cuttable):
    """An action on a helping thread."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.result: Any = None
        self._action = action
        self._error: BaseException | None = None
        self._done = threading.Event()
        helper = _idle.pop() if _idle else _Helper()
        self.thread = helper.ident
        helper.calls.put(self)

    def run(self) -> None:
        """Run it, on the helping thread."""
        try:
            self.result = self._action()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error

    def finish(self) -> None:
        """Tell who waits that it is over."""
        self._done.set()

    def wait(self, limit: timedelta | None = None) -> None:
        if not self._done.wait(None if limit is None else limit.total_seconds()):
            raise RuntimeError("the call is not over")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._done.is_set()


class _Helper(threading.Thread):
    """Runs one call at a time, and is idle in between."""

    def __init__(self) -> None:
        super().__init__(name="gradsync-wait", daemon=True)
        self.calls: SimpleQueue[_Call] = SimpleQueue()
        self.start()

    def run(self) -> None:
        """Serve for ever."""
        while True:
            call = self.calls.get()
            call.run()
            _idle.append(self)
            call.finish()
            del call  # what it holds is to live no longer than it is needed


_idle: list[_Helper] = []


def _ranks_of(group: Any, watch: Watch) -> list[int]:
    return list(range(watch.world)) if group is None else dist.get_process_group_ranks(group)


def _wait_for_all(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def can_be_sliced(group: Any) -> bool:
    """Whether waiting for a work of this group with a limit leaves the work as it is."""
    return type(group) is dist.ProcessGroup and dist.get_backend(group) == dist.Backend.GLOO


def waits_of(group: Any) -> Waits:
    """Return how to wait for works of a group, with the limit of ``init_process_group``."""
    waits = _waits.get(group)
    if waits is None:
        waits = _waits[group] = Waits(group, watch_of_world(), None)
    return waits


def wait_for(group: Any, work: Any) -> None:
    """Wait for a work of a group; see ``Waits.wait`` for what it raises."""
    waits_of(group).wait(work)


def wait_for_thread(thread: threading.Thread) -> None:
    """Wait for a thread of this process that itself waits for other ranks; see ``Waits.wait`` for what it raises."""
    watch = watch_of_world()
    if watch is None:
        thread.join()
    else:
        waits = Waits(dist.group.WORLD, watch, None)
        waits.thread = thread.ident
        waits.wait(_ThreadEnd(thread))


_waits: "weakref.WeakKeyDictionary[Any, Waits]" = weakref.WeakKeyDictionary()

os.register_at_fork(after_in_child=_idle.clear)  # a child has no threads but one
