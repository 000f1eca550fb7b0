"""A child process that does not outlive the one that started it, however that one ends."""

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End this process when the one that started it is gone; at once if it is gone already.

    On Linux the kernel kills it, even where Python can't run; everywhere a thread waits for the end of
    a pipe that the parent holds open. Checkpoints stand a kill at any moment.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait_for_end_of, args=(parent.sentinel,), daemon=True).start()


def _wait_for_end_of(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
