"""A plain script under torchrun: the cause reaches every rank, and nothing outlives a failure or the launcher."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from listening import beyond_loopback

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them"),
]
ORPHANS_S = 60.0  # a data loader's worker looks for its parent every five seconds
START_S = 120.0


@contextmanager
def running(mode: str, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """The script on two ranks, in a session of its own; what is left of it in the end is killed."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [*command, str(Path(__file__).parent / "loop.py"), mode],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for member in members(process.pid):
            os.kill(member, signal.SIGKILL)
        process.wait()


def members(leader: int) -> dict[int, str]:
    """The living processes of a session, with their command lines."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if int(session) == leader and state != "Z":
            found[int(entry.name)] = command
    return found


def wait_for(folder: Path, text: str) -> None:
    until = time.monotonic() + START_S
    while text not in (output := (folder / "output.txt").read_text()):
        assert time.monotonic() < until, output
        time.sleep(0.1)


def assert_nothing_is_left(leader: int) -> None:
    until = time.monotonic() + ORPHANS_S
    while members(leader):
        assert time.monotonic() < until, members(leader)
        time.sleep(0.1)


def test_an_exception_on_one_rank_ends_all_and_is_told_by_all(tmp_path: Path) -> None:
    with running("raise", tmp_path) as process:
        assert process.wait(timeout=START_S) != 0
        assert_nothing_is_left(process.pid)
    output = (tmp_path / "output.txt").read_text()
    assert "ValueError: no such batch" in output, output
    assert "RankFailedError: rank 1 failed in pass 5" in output, output


def test_a_rank_that_hangs_is_named_by_the_other(tmp_path: Path) -> None:
    with running("hang", tmp_path) as process:
        assert process.wait(timeout=START_S) != 0
        assert_nothing_is_left(process.pid)
    output = (tmp_path / "output.txt").read_text()
    assert "StalledError" in output and "the odd one out is rank 1" in output, output
    assert "time.sleep(600)" in output, output


def test_nothing_outlives_a_killed_launcher_and_no_rank_listens_beyond_this_machine(tmp_path: Path) -> None:
    with running("go on", tmp_path) as process:
        wait_for(tmp_path, "on the way")
        ranks = [pid for pid in members(process.pid) if pid != process.pid]
        assert beyond_loopback(ranks) == set()
        process.kill()
        process.wait()
        assert_nothing_is_left(process.pid)


_LAUNCHER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]).wait()"
_RANK_THAT_LOOKS_FOR_OTHERS = """
import os, time
from gradsync.comm import process

def meet(*_):
    print("meeting", flush=True)
    time.sleep(600)

process.meet = meet
process.init_process_group("gloo", rank=0, world_size=2)
"""


def test_a_rank_that_still_looks_for_the_others_does_not_outlive_its_launcher() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "TORCHELASTIC_RUN_ID": "mine"}
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, _RANK_THAT_LOOKS_FOR_OTHERS],
        env={**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "meeting\n"
        process.kill()
        process.wait()
        assert_nothing_is_left(process.pid)
    finally:
        for member in members(process.pid):
            os.kill(member, signal.SIGKILL)
        process.communicate()
