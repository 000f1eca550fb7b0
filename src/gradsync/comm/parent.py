"""A process that does not outlive the one that has started it. Imports no torch."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that forked it is gone; on Linux only."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it went in between
        os.kill(os.getpid(), number)
