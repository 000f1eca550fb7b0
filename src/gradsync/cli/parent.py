"""A child process that does not outlive the one that started it, however that one ends."""

import multiprocessing
import multiprocessing.connection
import os
import threading

from gradsync.comm.parent import end_with_parent


def die_with_parent() -> None:
    """End this process when its parent is gone. Checkpoints stand a kill at any moment.

    On Linux the kernel kills it, even where Python can't run. Everywhere a thread waits for the end of a
    pipe that the process holds open that asked for this one; that covers a parent that is gone already.
    """
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait_for_end_of, args=(parent.sentinel,), daemon=True).start()


def _wait_for_end_of(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
