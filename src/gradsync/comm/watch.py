"""Keeps an eye on the other ranks while this one works or waits, and ends a wait that has become useless.

One thread a process reads the ledger twice a second. It answers where this rank is, even while the main thread is
stuck; it asks all ranks when this one has waited for longer than the soft limit; and when a rank has failed, or the
ranks were found to have lost each other, it leaves the error in ``error``, which every wait of this rank then raises.

[Note: Ending a wait] A wait on gloo cannot be interrupted, so it is cut into slices, between which it looks at
``error``. Groups written in Python offer ``give_up`` and are waited for in one piece. Where neither works the
group's own time-out has to do.

[Note: Cost] Nothing happens on a pass that goes well but a few attributes being set.
"""

import atexit
import linecache
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradsync.comm.aftermath import is_aftermath
from gradsync.comm.diagnosis import diagnose, name_of
from gradsync.comm.ledger import Event, Ledger, Place, can_hold_ledger
from gradsync.errors import GradsyncError, RankFailedError, StalledError

DEFAULT_SOFT_LIMIT_S = 60.0

_LOOK_S = 0.5
_HURRY_S = 0.05
_ANSWER_S = 1.5  # three looks of the rank that is asked
_POSTED_S = 1.0  # how long after the loss of a connection the cause may take to appear
_TOLD_S = 0.3  # the same where the other rank may well go on
_NOTED_S = 1.0
_AFTER_LEAVING_S = 1.0
_LAST_LOOK_S = 1.0
_STORE_S = 2.0  # how much longer the store itself may take
_STUCK_S = 3.0
_STACK_LINES = 6
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


class Watch:
    """The watch of this process over the ranks of the default group."""

    def __init__(self, ledger: Ledger, soft_limit_s: float) -> None:
        self.rank, self.world = ledger.rank, ledger.world
        self.soft_limit_s = soft_limit_s
        self.step = 0
        self.phase = "before the first pass"
        self.bucket: int | None = None
        self.waiting: Waits | None = None
        self.error: GradsyncError | None = None
        self.when_stuck: Callable[[GradsyncError], None] | None = None
        """Called, on the watch's thread, when an error is known and the rank has not raised it after a while."""
        self.has_raised = False
        self.is_deaf = False
        """The store is gone, and with it all that the ranks could tell each other."""
        self._excuse = ""
        self._left: set[int] = set()
        self._ledger = ledger
        self._waiter = threading.main_thread().ident
        self._is_over = threading.Event()
        self._hurries = 0
        self._known_since_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="gradsync-watch", daemon=True)

    def start(self) -> None:
        """Begin to read the ledger."""
        self._thread.start()

    def stop(self, patience_s: float = 0.0) -> bool:
        """End the thread; returns whether it has ended in time, which it does unless the store is stuck.

        A thread that is in the store's C++ code when the interpreter shuts down takes the process with it.
        """
        self._is_over.set()
        if self._thread.is_alive() and patience_s:
            self._thread.join(patience_s)
        return not self._thread.is_alive()

    @contextmanager
    def excused(self, what: str) -> Iterator[None]:
        """Ask the other ranks to be patient while this rank alone does something long."""
        self._excuse = what
        try:
            yield
        finally:
            self._excuse = ""

    def report(self, error: BaseException) -> None:
        """Tell all ranks that an exception ends this one, and give them a moment to hear it."""
        text = f"{type(error).__name__}: {error}"
        others = [rank for rank in range(self.world) if rank != self.rank]
        with self._hurry():
            number = self._ledger.post(Event("failure", self.rank, text, {"step": self.step, "phase": self.phase}))
            self._poll(_NOTED_S, lambda: self._ledger.have_noted(number, others))

    def leave(self, takes_store_along: bool) -> None:
        """Tell all ranks that this one has ended in peace; if the store ends with it, they must not look any more."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        number = self._ledger.post(Event("left", self.rank, "store" if takes_store_along else ""))
        if takes_store_along:
            self._poll(_NOTED_S, lambda: self._ledger.have_noted(number, others))

    def raised(self) -> GradsyncError:
        """Return the error for raising it: a new object, since it may be raised many times and on several threads."""
        assert self.error is not None
        self.has_raised = True
        return type(self.error)(str(self.error))

    def forget(self) -> None:
        """Forget an error, because the ranks have agreed to go on."""
        self.error, self.has_raised = None, False

    def where(self) -> Place:
        """Return where this rank is now."""
        waiting = self.waiting
        waited_s = None if waiting is None else time.monotonic() - waiting.since_s
        return Place(self.step, self.phase, self.bucket, waited_s, self._excuse, stack_of(self._waiter))

    def explain(self, error: BaseException, members: Sequence[int]) -> BaseException:
        """Return what stands behind an error that may only be the echo of another rank's, or the error itself.

        ``members`` are asked whether they are still there, if nobody has told of a failure.
        """
        if self.error is None and not self.is_deaf:
            with self._hurry():
                self._poll(_POSTED_S if members else _TOLD_S, lambda: self.error is not None or self.is_deaf)
                if self.error is None and not self.is_deaf and members:
                    self.error = self._missing_in_time(error, members)
        return error if self.error is None else self.raised()

    def _missing_in_time(self, error: BaseException, members: Sequence[int]) -> GradsyncError | None:
        """Ask who is still there, though not for ever: on a host that is cut off the store never answers."""
        found: list[GradsyncError | None] = []
        asking = threading.Thread(target=lambda: found.append(self._missing(error, members)), daemon=True)
        asking.start()
        asking.join(_ANSWER_S + _STORE_S)
        if found:
            return found[0]
        self.is_deaf = True
        return RankFailedError(
            f"rank {self.rank} on host {socket.gethostname()}: lost in pass {self.step} ({self.phase}): neither the "
            f"other ranks nor the store answer, so this host's network is cut off, or rank 0's host is gone ({error})"
        )

    def _missing(self, error: BaseException, members: Sequence[int]) -> GradsyncError | None:
        """Ask who is still there, after a connection was lost and nobody has said why."""
        try:
            number = self._ledger.post(Event("inquiry", self.rank, members=tuple(members)))
            places: dict[int, Place] = {}
            self._poll(
                _ANSWER_S, lambda: len(places.update(self._ledger.answers(number, members)) or places) == len(members)
            )
        except Exception:  # noqa: BLE001 - the store went down too, so there is no more to be known
            return None
        silent = [rank for rank in members if rank not in places]
        if not silent:
            return None
        left = [rank for rank in silent if rank in self._left]
        how = (
            "ended before the others were done; give all ranks the same number of batches, or use join()"
            if left == silent
            else "does not answer any more: it was killed or has crashed; the cause is in its output"
        )
        return RankFailedError(
            f"rank {self.rank}: lost in pass {self.step} ({self.phase}): {name_of(silent)} {how} ({error})"
        )

    # -- on the thread

    def _run(self) -> None:
        group = _default_group()
        reference = None if group is None else weakref.ref(group)
        del group
        while not self._is_over.wait(_HURRY_S if self._hurries else self._interval_s()):
            if reference is not None and reference() is not _default_group():
                return  # the user has destroyed it
            try:
                self._look()
                if self.is_deaf:
                    return
            except Exception:  # noqa: BLE001 - the store is gone; the ranks go on without
                self.is_deaf = True
                return

    def _interval_s(self) -> float:
        waiting = self.waiting
        limit_s = self.soft_limit_s if waiting is None else waiting.limit_s
        return min(_LOOK_S, limit_s / 8) if limit_s > 0 else _LOOK_S

    def _look(self) -> None:
        for number, event in self._ledger.new_events():
            self._take(number, event)
        self._look_after_error()
        waiting = self.waiting
        if waiting is None:
            return
        if self.error is not None:
            waiting.interrupt(self.error)
        elif 0 < self._limit_of(waiting) < time.monotonic() - waiting.since_s:
            self._inquire(waiting)

    def _look_after_error(self) -> None:
        """A main thread that is stuck where nobody can interrupt it (in the store, say) does not hear of an error."""
        if self.error is None or self.has_raised or self.when_stuck is None:
            self._known_since_s = time.monotonic()
        elif time.monotonic() - self._known_since_s > _STUCK_S:
            self.when_stuck(self.error)

    def _limit_of(self, waiting: "Waits") -> float:
        """Who has ended will not come any more, however long one waits."""
        has_hope = self._left.isdisjoint(waiting.members)
        return waiting.limit_s if has_hope else min(waiting.limit_s or _AFTER_LEAVING_S, _AFTER_LEAVING_S)

    def _take(self, number: int, event: Event) -> None:
        concerns_me = not event.members or self.rank in event.members
        if event.kind == "left":
            self._left.add(event.rank)
            if event.text:
                self._ledger.note(number)
                self.is_deaf = True
        elif event.kind == "inquiry" and concerns_me:
            self._ledger.answer(number, self.where())
        elif event.kind == "verdict" and concerns_me and self.error is None:
            self.error = StalledError(f"rank {self.rank}: {event.text}")
        elif event.kind == "failure" and event.rank != self.rank:
            if self.error is None:
                self.error = RankFailedError(
                    f"rank {event.rank} failed in pass {event.place.get('step')} ({event.place.get('phase')}): "
                    f"{event.text} [seen by rank {self.rank} in pass {self.step}, {self.phase}]"
                )
            self._ledger.note(number)

    def _inquire(self, waiting: "Waits") -> None:
        """Ask where all are; the first one to have asked says to all what was found."""
        since_s = waiting.since_s
        members = waiting.members
        awaited = [rank for rank in members if rank not in self._left]
        number = self._ledger.post(Event("inquiry", self.rank, members=tuple(members)))
        until = time.monotonic() + _ANSWER_S
        places: dict[int, Place] = {}
        while len(places) < len(awaited) and time.monotonic() < until and self.error is None:
            for other, event in self._ledger.new_events():
                self._take(other, event)
            places = self._ledger.answers(number, awaited)
            time.sleep(_HURRY_S)
        if self.waiting is not waiting or waiting.since_s != since_s or self.error is not None:
            return  # it has got on meanwhile, or somebody else was quicker
        if len(places) == len(members) and any(place.excuse for place in places.values()):
            waiting.since_s = time.monotonic()
            return
        text = diagnose(members, places, sorted(self._left), waiting.limit_s, self.rank)
        self._ledger.post(Event("verdict", self.rank, text, members=tuple(members)))
        for other, event in self._ledger.new_events():
            self._take(other, event)

    # -- small things

    @contextmanager
    def _hurry(self) -> Iterator[None]:
        self._hurries += 1
        try:
            yield
        finally:
            self._hurries -= 1

    @staticmethod
    def _poll(limit_s: float, holds: Callable[[], bool]) -> bool:
        until = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > until:
                return False
            time.sleep(_HURRY_S / 2)
        return True


class Waits:
    """How one engine waits for the works of its group: watched, and with an end."""

    def __init__(self, group: Any, watch: Watch | None, limit_s: float | None, is_sliced: bool | None = None) -> None:
        if group not in dist.distributed_c10d._world.pg_map:  # one that torch does not know: its ranks have no numbers
            watch = None
        self._group = group
        self._watch = watch
        self._is_sliced = watch is not None and (can_be_sliced(group) if is_sliced is None else is_sliced)
        self.limit_s = limit_s if limit_s is not None else watch.soft_limit_s if watch is not None else 0.0
        self.members: list[int] = [] if watch is None else dist.get_process_group_ranks(group)
        self.since_s = 0.0

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
        watch.bucket = bucket
        watch.waiting = self
        try:
            if self._is_sliced and hasattr(work, "is_completed"):
                self._wait_in_slices(work, watch)
            else:
                work.wait()
        except (GradsyncError, RuntimeError) as error:
            watch.waiting = None
            explained = self.explain(error)
            if explained is error:
                raise
            raise explained from error
        finally:
            watch.waiting = None
            watch.bucket = None

    def explain(self, error: BaseException) -> BaseException:
        """Return the error of the rank that is behind this one, if there is such a rank."""
        if self._watch is None or isinstance(error, RankFailedError | StalledError) or not is_aftermath(error):
            return error
        return self._watch.explain(error, self.members)

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error of the rank that is behind this one, if it has told it."""
        if self._watch is None:
            return error
        return self._watch.explain(error, ())

    def interrupt(self, error: GradsyncError) -> None:
        """End a wait in one piece; see [Note: Ending a wait]."""
        give_up = getattr(self._group, "give_up", None)
        if give_up is not None:
            give_up(error)

    def forget(self) -> None:
        """Forget an error, because the ranks have agreed to go on."""
        if self._watch is not None:
            self._watch.forget()

    @staticmethod
    def _wait_in_slices(work: Any, watch: Watch) -> None:
        while not _is_over_within(work, _SLICE):
            if watch.error is not None:
                raise watch.raised()
        work.wait()


def _is_over_within(work: Any, limit: timedelta) -> bool:
    """Whether the work ends within a while, well or badly."""
    try:
        work.wait(limit)
    except RuntimeError:
        return bool(work.is_completed())
    return True


_SLICE = timedelta(seconds=0.2)


def can_be_sliced(group: Any) -> bool:
    """Whether waiting for a work of this group with a limit leaves the work as it is."""
    return type(group) is dist.ProcessGroup and dist.get_backend(group) == dist.Backend.GLOO


def stack_of(thread: int | None) -> tuple[str, ...]:
    """Return the last lines of a thread's stack, outermost first; the inside of torch and gradsync is left out."""
    frame = sys._current_frames().get(thread or 0)
    lines: list[str] = []
    library = str(Path(torch.__file__).parent) + os.sep
    while frame is not None and len(lines) < _STACK_LINES:
        path, number, name = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        is_inside = path.startswith(_PACKAGE) or (path.startswith(library) and bool(lines))
        if not is_inside and not path.startswith("<frozen"):
            source = linecache.getline(path, number).strip()
            lines.append(f"{Path(path).name}:{number} in {name}{': ' if source else ''}{source}")
        frame = frame.f_back
    return tuple(reversed(lines))


def excused(what: str) -> AbstractContextManager[None]:
    """Ask the other ranks to be patient while this rank alone does something long."""
    watch = watch_of_world()
    return nullcontext() if watch is None else watch.excused(what)


def wait_for(group: Any, work: Any) -> None:
    """Wait for a work of a group; see ``Waits.wait`` for what it raises."""
    waits = _waits.get(group)
    if waits is None:
        waits = _waits[group] = Waits(group, watch_of_world(), None)
    waits.wait(work)


def wait_for_thread(thread: threading.Thread) -> None:
    """Wait for a thread of this process that itself waits for other ranks; see ``Waits.wait`` for what it raises."""
    watch = watch_of_world()
    if watch is None:
        thread.join()
    else:
        Waits(_default_group(), watch, None, is_sliced=True).wait(_ThreadEnd(thread))


class _ThreadEnd:
    """Looks like a work that is complete when a thread has ended."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def wait(self, limit: timedelta | None = None) -> None:
        self._thread.join(None if limit is None else limit.total_seconds())
        if self._thread.is_alive():
            raise RuntimeError("the thread is still running")

    def is_completed(self) -> bool:
        return not self._thread.is_alive()


_waits: "weakref.WeakKeyDictionary[Any, Waits]" = weakref.WeakKeyDictionary()
_watches: "weakref.WeakKeyDictionary[Any, Watch]" = weakref.WeakKeyDictionary()
_soft_limit_s = DEFAULT_SOFT_LIMIT_S


def set_soft_limit(limit_s: float) -> None:
    """Let waits of this process that name no limit of their own take this one; 0 means none."""
    global _soft_limit_s
    _soft_limit_s = limit_s
    watch = watch_of_world()
    if watch is not None:
        watch.soft_limit_s = limit_s


def watch_of_world() -> Watch | None:
    """Return the watch over the default group, started when first asked for; None where there is nothing to watch."""
    group = _default_group()
    if group is None or group.size() == 1:
        return None
    if group not in _watches:
        store = dist.distributed_c10d._get_default_store()
        if not can_hold_ledger(store):
            return None
        watch = Watch(Ledger(store, group.rank(), group.size()), _soft_limit_s)
        _watches[group] = watch
        watch.start()
        atexit.unregister(_stop_all_at_exit)
        atexit.register(_stop_all_at_exit)
    return _watches[group]


def _default_group() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _forget_in_child() -> None:
    """A forked child has neither the threads nor the say of its parent."""
    for watch in list(_watches.values()):
        watch.stop()
    _watches.clear()


def stop_all(patience_s: float) -> bool:
    """End every watch of this process, before the interpreter shuts down; returns whether all have ended."""
    return all([watch.stop(patience_s) for watch in list(_watches.values())])


def _stop_all_at_exit() -> None:
    stop_all(_LAST_LOOK_S)


os.register_at_fork(after_in_child=_forget_in_child)
