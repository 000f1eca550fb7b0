"""What a rank does at its end: an exception that nobody caught is told to the others, and clean-up cannot hang.

Installed in place of ``sys.excepthook`` and ``threading.excepthook``, which it calls. An error that is only the echo of
another rank's is not told; its cause is printed below the traceback instead.

[Note: Last resort] A rank that stands in a collective of torch's hears of nothing. If another one has failed, or does
not answer any more, what it waits for will not come, and its process is ended with the cause (not in an interactive
session).
"""

import atexit
import contextlib
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, NoReturn

from gradsync.comm.aftermath import is_aftermath
from gradsync.comm.remarks import add_remark, in_a_line
from gradsync.comm.standstill import stack_of
from gradsync.comm.watch import set_last_resort
from gradsync.comm.watches import stop_all, watch_of_last_world, watch_of_world
from gradsync.errors import GradsyncError, RankFailedError, StalledError

CLEANUP_S = 3.0
"""How long the interpreter may take to shut down after an exception."""

_STORE_S = 2.5
_TELLING_S = 5.0  # others may have to be asked whether they are still there
_STOPPING_S = 2.0
_BEFORE_ALL = 1000  # what runs at the end of multiprocessing's processes: that with the highest number first
_owner = 0
_takes_store_along = False


def install(serves_store: bool = False) -> None:
    """Have this process tell the other ranks how it ends; again: no effect."""
    global _owner, _takes_store_along
    _takes_store_along |= serves_store
    if _owner == os.getpid():
        return
    _owner = os.getpid()
    words = _LastWords(sys.excepthook)
    sys.excepthook = words
    threading.excepthook = _ThreadsWords(threading.excepthook)
    atexit.register(_at_exit, words)
    if multiprocessing.parent_process() is not None:
        Finalize(None, _at_process_end, (words,), exitpriority=_BEFORE_ALL)
    if not hasattr(sys, "ps1") and not sys.flags.interactive:
        set_last_resort(_end_stuck)


def tell(error: BaseException) -> str:
    """Tell the other ranks of an exception that ends this one; return what another rank had told before."""
    add_remark(error)
    told = [""]
    _bounded(lambda: told.__setitem__(0, _tell(error)), _TELLING_S)
    return told[0]


def part() -> None:
    """Leave the others, after ``tell``, who have probably failed of the same: whoever serves the store ends last.

    Torch complains at length, for each rank that still looks into it, of a store that is gone.
    """
    watch = watch_of_world()
    if watch is None:
        return
    _bounded(watch.acknowledge)
    watch.stop(_STOPPING_S)
    _bounded(watch.see_off if _takes_store_along else lambda: watch.leave(takes_store_along=False))


def end_soon() -> None:
    """End the process without ceremony if it is still there in a while: a lost process group may hang at shutdown."""
    with contextlib.suppress(Exception):  # no standard error, say
        faulthandler.dump_traceback_later(CLEANUP_S, exit=True, file=2)


def _tell(error: BaseException) -> str:
    watch = watch_of_last_world()
    if watch is None or isinstance(error, RankFailedError | StalledError):
        return ""
    if watch.error is None and not is_aftermath(error):
        watch.report(error)
        return ""
    explained = watch.explain(error, range(watch.world))
    if explained is not error:
        return str(explained)
    watch.report(error)  # it only looked like an echo: nobody has failed before
    return ""


class _LastWords:
    def __init__(self, previous: Callable[..., Any]) -> None:
        self._previous = previous
        self.has_spoken = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        add_remark(error)
        self._previous(kind, error, trace)
        self.speak(error)

    def speak(self, error: BaseException) -> None:
        """Tell the others of an exception that ends this process, or its user what has caused it."""
        if os.getpid() != _owner or not _is_a_rank():
            return
        told = tell(error)
        end_soon()
        if told:
            print(f"gradsync: the cause: {told}", file=sys.stderr, flush=True)
        self.has_spoken = True
        _let_the_failed_end()


class _ThreadsWords:
    """A thread's exception ends no process, but its main thread may wait for that thread, and the others for that."""

    def __init__(self, previous: Callable[..., Any]) -> None:
        self._previous = previous

    def __call__(self, ended: threading.ExceptHookArgs) -> None:
        self._previous(ended)
        watch = watch_of_world() if os.getpid() == _owner and _is_a_rank() else None
        if watch is not None and ended.exc_value is not None:
            watch.mishap = in_a_line(ended.exc_value)


def _at_exit(words: _LastWords) -> None:
    """At a regular end say so, in case that others still count on this rank; after an exception end at once."""
    if os.getpid() != _owner:
        return
    _leave(words)
    if words.has_spoken:
        end_now(1)


def _at_process_end(words: _LastWords) -> None:
    """Do the same in a process of multiprocessing's, which sees to exceptions itself and may end without ``atexit``."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):  # torch's spawn ends with it when it has written an exception down
        error = error.__context__ if error.code else None
    if error is not None:
        words.speak(error)
    if os.getpid() == _owner:
        _leave(words)


def _leave(words: _LastWords) -> None:
    watch = watch_of_world()
    is_store_alive = stop_all(_STOPPING_S)
    has_to_say = watch is not None and not watch.is_deaf and (_takes_store_along or not words.has_spoken)
    if watch is not None and is_store_alive and has_to_say:
        _bounded(lambda: watch.leave(_takes_store_along))


def _end_stuck(error: GradsyncError) -> NoReturn:
    """See [Note: Last resort]; runs on the watch's thread."""
    where = "".join(f"\n  {line}" for line in stack_of(threading.main_thread().ident))
    print(f"gradsync: {type(error).__name__}: {error}\nthis process is ended, as it waits in{where}", file=sys.stderr)
    end_now(1)


def end_now(code: int) -> NoReturn:
    """End without the interpreter's shutdown, in which a group with work under way waits for its peers."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a data loader's handler would complain about what follows
    _let_the_failed_end()
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _let_the_failed_end() -> None:
    """A launcher ends this rank as soon as it sees one that has failed, so that one waits for this one's word."""
    watch = watch_of_last_world() if _is_a_rank() else None
    if watch is not None:
        _bounded(watch.acknowledge)


def _is_a_rank() -> bool:
    try:
        return watch_of_last_world() is not None
    except RuntimeError:
        return False


def _bounded(action: Callable[[], Any], limit_s: float = _STORE_S) -> None:
    """Talk to the store, but not for long: it may be gone or stuck."""

    def guarded() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=guarded, name="gradsync-last-words", daemon=True)
    thread.start()
    thread.join(limit_s)
