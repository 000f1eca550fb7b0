"""Functions on processes of this machine: results by rank, errors as they were raised, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import wait_until

from gradsync.cli.local_ranks import Patience, RankLostError, run_processes, run_ranks, start_fork_server
from gradsync.errors import ConfigError, GradsyncError

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them"),
]


def _work(job):
    rank = int(os.environ["RANK"])
    if job == "refuse" and rank == 1:
        raise ConfigError("--model x: no such thing")
    if job == "break" and rank == 1:
        raise ZeroDivisionError("a stone")
    if job == "leave" and rank == 1:
        os._exit(3)
    if job in ("break", "leave"):
        time.sleep(1000)
    return rank, os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]


def test_results_and_errors_come_back():
    assert run_ranks(_work, 2, "return") == {0: (0, "2", "127.0.0.1"), 1: (1, "2", "127.0.0.1")}
    with pytest.raises(ConfigError, match=r"^--model x: no such thing$"):
        run_ranks(_work, 2, "refuse")
    with pytest.raises(GradsyncError, match=r"^rank 1: ZeroDivisionError: a stone$"):
        run_ranks(_work, 2, "break")
    with pytest.raises(GradsyncError, match="rank 1 ended with exit code 3 and without a word"):
        run_ranks(_work, 2, "leave")


def _fail_beside_deaf_ranks(folder):
    """Rank 0 is stopped, rank 1 hears no SIGTERM, both have a child of their own; rank 2 fails."""
    rank = int(os.environ["RANK"])
    if rank < 2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"])
        (folder / f"{rank}.unfinished").write_text(f"{os.getpid()} {child.pid}")
        (folder / f"{rank}.unfinished").rename(folder / f"{rank}.pids")
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    wait_until(lambda: len(list(folder.glob("*.pids"))) == 2, "both others are there")
    raise ConfigError("the cause")


def test_ranks_that_do_not_react_are_ended_with_all_they_have_started(tmp_path):
    start_fork_server()
    with pytest.raises(RankLostError) as lost:
        run_processes(_fail_beside_deaf_ranks, 3, (tmp_path,), tmp_path, Patience(0.2, 0.5))
    assert (lost.value.failure.rank, lost.value.failure.message, lost.value.failure.exit_code) == (2, "the cause", 2)
    pids = [int(pid) for file in tmp_path.glob("*.pids") for pid in file.read_text().split()]
    assert len(pids) == 4
    wait_until(lambda: not any(_is_running(pid) for pid in pids), "all have ended")


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
