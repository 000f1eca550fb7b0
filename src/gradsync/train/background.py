"""Checkpoints written beside the training: the state is copied at once, written by a thread.

One write at a time; the next one waits for the one before. What went wrong in the thread is raised by
whoever waits for it, on all ranks in the same step. The thread has a process group of its own.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradsync.comm.waits import wait_for_thread
from gradsync.comm.watches import excused, watch_of_world
from gradsync.parallel.pieces import copied_to_cpu
from gradsync.train.checkpoint import CheckpointFolder
from gradsync.train.state import State

# How long a run that failed waits for a checkpoint under way: with peers not for long, they may be gone.
_PATIENCE_S = 3.0
_PATIENCE_ALONE_S = 60.0


class BackgroundWriter:
    """Saves checkpoints in a thread, or at once if ``is_waiting``; the outcome is the same to the caller."""

    def __init__(self, folder: CheckpointFolder, is_waiting: bool, tell: Callable[[Path], None]) -> None:
        self._folder = folder
        self._is_waiting = is_waiting
        self._tell = tell
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written: Path | None = None

    def save(self, step: int, tensors: State, facts: dict[str, Any]) -> None:
        """Start writing a checkpoint of the tensors as they are now; ``finish`` must have been called."""
        assert self._thread is None and self._error is None
        if self._is_waiting:
            with excused("writing a checkpoint"):
                self._write(step, tensors, facts)
            self.poll()
            return
        copies = {name: copied_to_cpu(tensor) for name, tensor in tensors.items()}
        self._thread = threading.Thread(target=self._write, args=(step, copies, facts), daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Tell of a checkpoint that has been written meanwhile."""
        written, self._written = self._written, None
        if written is not None:
            self._tell(written)

    def finish(self) -> None:
        """Wait for the checkpoint under way.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._thread is not None:
            with excused("writing a checkpoint"):
                wait_for_thread(self._thread)
            self._thread = None
        self.poll()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Give the checkpoint under way a while after a failure, and say nothing about it."""
        if self._thread is not None:
            self._thread.join(_PATIENCE_ALONE_S if watch_of_world() is None else _PATIENCE_S)

    def _write(self, step: int, tensors: State, facts: dict[str, Any]) -> None:
        try:
            self._written = self._folder.save(step, tensors, facts)
        except BaseException as error:  # noqa: BLE001 - raised again by finish()
            self._error = error
