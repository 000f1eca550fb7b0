"""Keeps a second run out of a folder. The lock ends with the process, however that ends."""

import contextlib
import os
import time
from pathlib import Path

from gradsync.errors import ConfigError

# A run that was killed may take a moment to be gone.
_PATIENCE_S = 5.0
_POLL_S = 0.05


class FolderLock:
    """Held from its making until ``release``; where the file system has no locks, it keeps nobody out."""

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = os.open(folder, os.O_RDONLY) if os.name == "posix" else None
        deadline = time.monotonic() + _PATIENCE_S
        while not self._try():
            if time.monotonic() > deadline:
                self.release()
                raise ConfigError(
                    f"another process is training in run folder {folder}; wait for it to end, "
                    f"or give another folder with --run"
                )
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Let others in."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _try(self) -> bool:
        if self._descriptor is None:
            return True
        import fcntl

        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def __del__(self) -> None:
        self.release()
