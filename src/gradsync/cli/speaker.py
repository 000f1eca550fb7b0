"""Who of the processes of a launcher tells the user what they all have found. Imports no torch.

Before the ranks have met, all processes of a host find the same fault in the options or in the user's model, so one of
them tells it. The others wait until it has: torchrun ends all processes as soon as one has ended badly.
"""

import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

from gradsync.comm.launchers import Placement, adopt
from gradsync.errors import ConfigError, GradsyncError, UserCodeError

_PATIENCE_S = 5.0


def told_here(error: GradsyncError) -> str | None:
    """Return what this process is to say of an error; None if another one does."""
    place = _own_place()
    if place is None or place.rank == 0:
        return str(error)
    if isinstance(error, ConfigError | UserCodeError) and place.local_rank != 0 and not _have_met():
        return None
    where = "" if place.world_size == place.local_world_size else f" on host {socket.gethostname()}"
    return f"rank {place.rank}{where}: {error}"


def let_speak(code: int) -> None:
    """Wait for some seconds, in which a launcher ends this process if the one that tells has done so."""
    leave_with(code)
    time.sleep(_PATIENCE_S)


def leave_with(code: int) -> None:
    """Have this process, which has failed, end with its own exit code when the launcher ends it because of another."""

    def leave(number: int, frame: FrameType | None) -> None:
        os._exit(code)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)


def _have_met() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def _own_place() -> Placement | None:
    try:
        return adopt(os.environ)
    except ConfigError:  # what is told may be just that
        return None
