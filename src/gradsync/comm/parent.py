"""A process that does not outlive the one that has started it. Imports no torch."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2


def end_with_parent(number: int = signal.SIGKILL, yields: bool = False) -> bool:
    """Have the kernel send this process a signal when the thread that forked it is gone; on Linux only.

    ``yields``: if a signal has been asked for already, that one stays. Returns whether this one holds.
    """
    if sys.platform != "linux":
        return False
    parent, earlier = os.getppid(), ctypes.c_int(0)
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_GET_PDEATHSIG, ctypes.byref(earlier))
    if yields and earlier.value:
        return False
    library.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it went in between
        os.kill(os.getpid(), number)
    return True
