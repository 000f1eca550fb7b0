"""Runs a function on a few processes of this machine, for the commands that measure and compare."""

import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

from gradsync.errors import BackendError


def run_ranks(entry: Any, nproc: int, job: Any) -> dict[int, Any]:
    """Run ``entry(job)`` on ``nproc`` local processes and return their results by rank.

    Raises:
        BackendError: a process failed; its error is shown.
        KeyboardInterrupt: the user has pressed Ctrl-C.
        SystemExit: this process was asked to end by another signal.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from gradsync.cli.launch import launch_config

    # it reports every failure at length; we say it in one line
    for talker in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(talker).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="gradsync-") as folder:
        try:
            results: dict[int, Any] = elastic_launch(launch_config(nproc, Path(folder)), entry)(job)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from error
            raise SystemExit(128 + error.sigval) from error
        except ChildFailedError as error:
            rank, lost = error.get_first_failure()
            raise BackendError(f"rank {rank} failed (exit code {lost.exitcode}): {_cause(lost.message)}") from error
    return results


def _cause(message: Any) -> str:
    """Return the exception alone; elastic adds its whole trace."""
    return str(message.get("message", message)) if isinstance(message, dict) else str(message)
