"""Starts the ranks of this machine through torch's elastic agent, and answers for them to the user.

[Note: Signals] SIGINT, SIGTERM and SIGHUP are blocked here before anything is started, and one thread
waits for them. So no signal interrupts the agent at a bad moment, and the children are born deaf to
them until they have set up what to do. The word to stop goes to the ranks through a file: a rank that
is still importing torch finds it as well.
"""

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gradsync.cli.main import EXIT_FAILED, EXIT_INTERRUPTED, fail
from gradsync.cli.worker import EXIT_TERMINATED, STOP_WORD, Failure, describe, exit_code, keep_trace, run_local_rank
from gradsync.train.config import TrainConfig
from gradsync.train.interrupt import StopReason

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_LOOPBACK = "127.0.0.1"


def launch(config: TrainConfig, nproc: int) -> int:
    """Train with ``nproc`` processes of this machine and return the exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    control = Path(tempfile.mkdtemp(prefix="gradsync-"))
    listener = _Listener(control)
    listener.start()
    try:
        return _run_ranks(config, nproc, control, listener)
    finally:
        shutil.rmtree(control, ignore_errors=True)


def _run_ranks(config: TrainConfig, nproc: int, control: Path, listener: "_Listener") -> int:
    # It reports every failure at length, and so do we, in one line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        outcomes = elastic_launch(_launch_config(nproc, control), run_local_rank)(config, control, os.getpid())
    except ChildFailedError as error:
        if listener.reason is not StopReason.NONE and not list(control.glob("rank-*.json")):
            return _exit_code_of(listener.reason)  # stopped before the ranks could listen
        return _report(config, _find_failure(control, error))
    return exit_code(outcomes[0])


def _launch_config(nproc: int, control: Path) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id="gradsync",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{_LOOPBACK}:0",  # 0: any free port
        local_addr=_LOOPBACK,
        max_restarts=0,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(control / "agent")),
    )


def _find_failure(control: Path, error: ChildFailedError) -> Failure:
    """Return the failure that caused the others: not one that only tells of a lost rank, if there is another."""
    recorded = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(control.glob("rank-*.json"))]
    failures = sorted((Failure(**entry) for entry in recorded), key=lambda failure: failure.is_aftermath)
    if failures and not failures[0].is_aftermath:
        return failures[0]
    rank, lost = error.get_first_failure()
    silent = [failure for failure in failures if failure.rank == rank]
    return silent[0] if silent else _silent_failure(rank, lost.exitcode)


def _silent_failure(rank: int, code: int) -> Failure:
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (often: out of memory)" if -code == signal.SIGKILL else ""
        message = f"rank {rank} was killed by {name}{hint}"
    else:
        message = f"rank {rank} ended with exit code {code} and without a word"
    return Failure(rank, "", message, "", EXIT_FAILED, is_expected=True, is_aftermath=False)


def _report(config: TrainConfig, failure: Failure) -> int:
    keep_trace(config, failure)
    return fail("gradsync train", describe(failure, config), failure.exit_code)


def _exit_code_of(reason: StopReason) -> int:
    return EXIT_INTERRUPTED if reason is StopReason.INTERRUPT else EXIT_TERMINATED


class _Listener(threading.Thread):
    """Waits for signals: hands the first on to the ranks, ends everything at the second Ctrl-C."""

    def __init__(self, control: Path) -> None:
        super().__init__(daemon=True)
        self._control = control
        self.reason = StopReason.NONE

    def run(self) -> None:
        """See [Note: Signals]."""
        while True:
            number = signal.sigwait(_SIGNALS)
            reason = StopReason.INTERRUPT if number == signal.SIGINT else StopReason.TERMINATE
            if reason is StopReason.INTERRUPT and self.reason is StopReason.INTERRUPT:
                shutil.rmtree(self._control, ignore_errors=True)
                os._exit(EXIT_INTERRUPTED)  # the ranks die with us
            self._ask(reason)

    def _ask(self, reason: StopReason) -> None:
        if reason <= self.reason:
            return
        self.reason = reason
        word: Any = self._control / f"{STOP_WORD}.unfinished"
        word.write_text(reason.name, encoding="utf-8")
        os.replace(word, self._control / STOP_WORD)
        print("stopping after this step (Ctrl-C again: at once) ...", file=sys.stderr, flush=True)
