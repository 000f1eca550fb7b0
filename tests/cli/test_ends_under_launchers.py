"""Ctrl-C and SIGTERM under torchrun and mpiexec: the run is saved, with the exit codes of the page on clusters."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from commands import SMALL, TIMEOUT_S, environment, session_members, wait_until

_MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--"]
_ENDLESS = ["train", "--data", "text.txt", "--device", "cpu", *SMALL, "--eval-every", "0", "--steps", "1000000"]

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them"),
]


def _launched(launcher: str) -> list[str]:
    if launcher == "torchrun":
        return [*_TORCHRUN, "gradsync"]
    if _MPIEXEC is None or subprocess.run([sys.executable, "-c", "import mpi4py"], capture_output=True).returncode:
        pytest.skip("needs mpi4py and an mpiexec (pip install mpi4py mpich)")
    return [_MPIEXEC, "-n", "2", sys.executable, "-m", "gradsync"]


def _family(pid: int) -> list[int]:
    """A launcher's processes, which torchrun puts into sessions of their own."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(member for child in children for member in _family(child))]


@pytest.mark.parametrize(
    ("launcher", "number", "code"),
    [
        ("torchrun", signal.SIGINT, 1),
        ("torchrun", signal.SIGTERM, 1),
        ("mpiexec", signal.SIGINT, 130),
        ("mpiexec", signal.SIGTERM, 143),
    ],
)
def test_the_run_is_saved_and_the_launcher_says_how_it_ended(
    tmp_path: Path, launcher: str, number: signal.Signals, code: int
) -> None:
    (tmp_path / "text.txt").write_text("".join(f"The {n}th line of {n * n} lines.\n" for n in range(400)))
    metrics, story = tmp_path / "run" / "metrics.jsonl", tmp_path / "story.txt"
    with story.open("w") as told:
        process = subprocess.Popen(
            [*_launched(launcher), *_ENDLESS, "--run", "run"],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: process.poll() is not None or metrics.exists() and metrics.stat().st_size > 0, "a step")
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # the terminal's Ctrl-C reaches every process
        else:
            process.send_signal(number)
        assert process.wait(TIMEOUT_S) == code, story.read_text()
    finally:
        for member in [*_family(process.pid), *session_members(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        process.wait()
    last = len(metrics.read_text().splitlines())
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{last:08d}"]
    assert story.read_text().count(f"stopped after step {last} of 1000000; go on with:") == 1
