"""A child process that does not outlive its parent, however the parent ends."""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 1.0


def die_with(parent: int) -> None:
    """Have this process killed when its parent process is gone; at once if it is gone already.

    Linux's kernel does it; elsewhere a thread looks once a second. Checkpoints stand a kill at any
    moment, so nothing is lost but the steps since the last one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)
