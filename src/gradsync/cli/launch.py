"""Starts the ranks of ``gradsync train`` on this machine, and answers for them to the user.

[Note: Signals] SIGINT, SIGTERM and SIGHUP are blocked here before anything is started (and in ``main`` while numpy,
which starts threads of its own, is imported), and one thread waits for them. So no signal interrupts the launcher at a
bad moment, and the ranks are born deaf to them until they have set up what to do. The word to stop goes to the ranks
through a file: a rank that is still importing torch finds it as well.
"""

import os
import shutil
import signal
import sys
import tempfile
import threading
from multiprocessing import util
from pathlib import Path

from gradsync.cli.failures import describe, keep_trace
from gradsync.cli.local_ranks import Patience, RankLostError, run_processes, start_fork_server, start_resource_tracker
from gradsync.cli.main import EXIT_INTERRUPTED, fail, stop_signals
from gradsync.observe.terminal import lasting
from gradsync.train.config import TrainConfig
from gradsync.train.interrupt import STOP_WORD, StopReason

_PATIENCE = Patience(grace_s=10.0, terminate_s=5.0)
"""A rank that waits for one that failed takes up to six seconds to learn it and to say so."""


def launch(config: TrainConfig, nproc: int) -> int:
    """Train with ``nproc`` processes of this machine and return the exit code."""
    start_resource_tracker()  # first: up to Python 3.11 that unblocks signals
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    control = Path(tempfile.mkdtemp(prefix="gradsync-"))
    listener = _Listener(control)
    listener.start()
    start_fork_server()
    try:
        return _run_ranks(config, nproc, control)
    finally:
        shutil.rmtree(control, ignore_errors=True)


def _run_ranks(config: TrainConfig, nproc: int, control: Path) -> int:
    from gradsync.cli.worker import exit_code, run_local_rank

    try:
        outcomes = run_processes(run_local_rank, nproc, (config, control), control, _PATIENCE)
    except RankLostError as error:
        keep_trace(config, error.failure)
        return fail("gradsync train", describe(error.failure, config), error.failure.exit_code)
    return exit_code(outcomes[0])


class _Listener(threading.Thread):
    """Waits for signals: hands the first on to the ranks, ends everything at the second Ctrl-C."""

    def __init__(self, control: Path) -> None:
        super().__init__(daemon=True)
        self._control = control
        self._reason = StopReason.NONE

    def run(self) -> None:
        """See [Note: Signals]."""
        while True:
            number = signal.sigwait(stop_signals())
            reason = StopReason.INTERRUPT if number == signal.SIGINT else StopReason.TERMINATE
            if reason is StopReason.INTERRUPT and self._reason is StopReason.INTERRUPT:
                print("ended at once, without a checkpoint of this step", file=lasting(sys.stderr), flush=True)
                for folder in (self._control, util.get_temp_dir()):  # what leaving in the usual way would remove
                    shutil.rmtree(folder, ignore_errors=True)
                os._exit(EXIT_INTERRUPTED)  # the ranks die with us
            if reason > self._reason:
                self._reason = reason
                self._ask(reason)

    def _ask(self, reason: StopReason) -> None:
        unfinished = self._control / f"{STOP_WORD}.unfinished"
        unfinished.write_text(reason.name, encoding="utf-8")
        os.replace(unfinished, self._control / STOP_WORD)
        how = "Ctrl-C again: at once" if reason is StopReason.INTERRUPT else "asked to by a signal"
        print(f"stopping after this step ({how}) ...", file=lasting(sys.stderr), flush=True)
