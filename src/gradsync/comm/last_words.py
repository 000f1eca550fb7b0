"""What a rank does at its end: an exception that nobody caught is told to the others, and clean-up cannot hang.

Installed in place of ``sys.excepthook``, which it calls. An error that is only the echo of another rank's is not
told; its cause is printed below the traceback instead.
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
from types import TracebackType
from typing import Any, NoReturn

from gradsync.comm.aftermath import is_aftermath
from gradsync.comm.watch import stop_all, watch_of_world
from gradsync.errors import RankFailedError, StalledError

CLEANUP_S = 3.0
"""How long the interpreter may take to shut down after an exception."""

_STORE_S = 2.5
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
    atexit.register(_at_exit, words)


def tell(error: BaseException) -> str:
    """Tell the other ranks of an exception that ends this one; return what another rank had told before."""
    told = [""]
    _bounded(lambda: told.__setitem__(0, _tell(error)))
    return told[0]


def end_soon() -> None:
    """End the process without ceremony if it is still there in a while: a lost process group may hang at shutdown."""
    with contextlib.suppress(Exception):  # no standard error, say
        faulthandler.dump_traceback_later(CLEANUP_S, exit=True, file=2)


def _tell(error: BaseException) -> str:
    watch = watch_of_world()
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
        self._previous(kind, error, trace)
        if os.getpid() != _owner or not _is_a_rank():
            return
        end_soon()
        told = tell(error)
        if told:
            print(f"gradsync: the cause: {told}", file=sys.stderr, flush=True)
        self.has_spoken = True
        _let_the_failed_end()


def _at_exit(words: _LastWords) -> None:
    """At a regular end say so, in case that others still count on this rank; after an exception end at once."""
    if os.getpid() != _owner:
        return
    watch = watch_of_world()
    is_store_alive = stop_all(1.0)
    if watch is not None and is_store_alive and (_takes_store_along or not words.has_spoken):
        _bounded(lambda: watch.leave(_takes_store_along))
    if words.has_spoken:
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
    watch = watch_of_world() if _is_a_rank() else None
    if watch is not None:
        _bounded(watch.acknowledge)


def _is_a_rank() -> bool:
    try:
        return watch_of_world() is not None
    except RuntimeError:
        return False


def _bounded(action: Callable[[], Any]) -> None:
    """Talk to the store, but not for long: it may be gone or stuck."""

    def guarded() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=guarded, name="gradsync-last-words", daemon=True)
    thread.start()
    thread.join(_STORE_S)
