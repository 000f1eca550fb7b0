"""Starts the ranks of this machine through torch's elastic agent, and answers for them to the user.

[Note: Signals] SIGINT, SIGTERM and SIGHUP are blocked here before anything is started, and one thread
waits for them. So no signal interrupts the agent at a bad moment, and the ranks are born deaf to them
until they have set up what to do. The word to stop goes to the ranks through a file: a rank that is
still importing torch finds it as well.

[Note: Fork server] On Linux a server process imports torch while this one does, and the ranks are
forked from it: three imports become two, side by side. Elsewhere every rank imports for itself.
"""

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

from gradsync.cli.failures import cause, describe, keep_trace, recorded
from gradsync.cli.main import EXIT_INTERRUPTED, fail
from gradsync.observe.terminal import lasting
from gradsync.train.config import TrainConfig
from gradsync.train.interrupt import STOP_WORD, StopReason

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"


def launch(config: TrainConfig, nproc: int) -> int:
    """Train with ``nproc`` processes of this machine and return the exit code."""
    _start_resource_tracker()  # first: up to Python 3.11 that unblocks signals
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    control = Path(tempfile.mkdtemp(prefix="gradsync-"))
    listener = _Listener(control)
    listener.start()
    _start_fork_server()
    try:
        return _run_ranks(config, nproc, control, listener)
    finally:
        shutil.rmtree(control, ignore_errors=True)


def _start_resource_tracker() -> None:
    """Start the process that removes our semaphores when we are killed, and have it do so without a word."""
    quiet = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(quiet)  # handed to the process as -W
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(quiet)


def _start_fork_server() -> None:
    """See [Note: Fork server]."""
    if _START_METHOD == "forkserver":
        from multiprocessing import forkserver

        multiprocessing.set_forkserver_preload(["gradsync.cli.preload"])
        forkserver.ensure_running()


def _run_ranks(config: TrainConfig, nproc: int, control: Path, listener: "_Listener") -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from gradsync.cli.worker import exit_code, run_local_rank

    # It reports every failure at length; we say it in one line.
    for talker in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(talker).setLevel(logging.CRITICAL)
    try:
        outcomes = elastic_launch(launch_config(nproc, control), run_local_rank)(config, control)
    except ChildFailedError as error:
        rank, lost = error.get_first_failure()
        failure = cause(recorded(control), rank, lost.exitcode)
        keep_trace(config, failure)
        return fail("gradsync train", describe(failure, config), failure.exit_code)
    return exit_code(outcomes[0])


def launch_config(nproc: int, control: Path) -> "LaunchConfig":
    """Return the agent's settings for ``nproc`` processes of this machine; it keeps its files in ``control``."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from gradsync.cli import local_rendezvous
    from gradsync.comm.interfaces import LOOPBACK

    local_rendezvous.register()
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id="gradsync",
        rdzv_backend=local_rendezvous.NAME,
        local_addr=LOOPBACK,
        max_restarts=0,
        start_method=_START_METHOD,
        logs_specs=DefaultLogsSpecs(log_dir=str(control / "agent")),
    )


class _Listener(threading.Thread):
    """Waits for signals: hands the first on to the ranks, ends everything at the second Ctrl-C."""

    def __init__(self, control: Path) -> None:
        super().__init__(daemon=True)
        self._control = control
        self._reason = StopReason.NONE

    def run(self) -> None:
        """See [Note: Signals]."""
        while True:
            number = signal.sigwait(_SIGNALS)
            reason = StopReason.INTERRUPT if number == signal.SIGINT else StopReason.TERMINATE
            if reason is StopReason.INTERRUPT and self._reason is StopReason.INTERRUPT:
                shutil.rmtree(self._control, ignore_errors=True)
                os._exit(EXIT_INTERRUPTED)  # the ranks die with us
            if reason > self._reason:
                self._reason = reason
                self._ask(reason)

    def _ask(self, reason: StopReason) -> None:
        unfinished = self._control / f"{STOP_WORD}.unfinished"
        unfinished.write_text(reason.name, encoding="utf-8")
        os.replace(unfinished, self._control / STOP_WORD)
        print("stopping after this step (Ctrl-C again: at once) ...", file=lasting(sys.stderr), flush=True)
