"""The same faults in ranks that ``mpiexec`` has started, which ends all of them when one ends badly."""

import contextlib
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fault_rank import SOFT_LIMIT_S, START_LIMIT_S, Assignment, config_of
from harness import PATIENCE_S, left_in_memory, state_of, stop_s
from injector import HARMLESS, STRUCK, Fault, all_faults

from gradsync.comm.watch import _EXCUSED_LIMITS
from training_jobs import losses, write_text

_MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
_TASK = "task.pickle"
_UNDISTURBED_S = 150.0
OPTIONS = {"async_checkpoints": True}

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="stops, limits and inspects processes as Linux does"),
    pytest.mark.skipif(
        importlib.util.find_spec("mpi4py") is None or _MPIEXEC is None,
        reason="needs mpi4py and an mpiexec (pip install mpi4py mpich)",
    ),
]

IN_CI = [Fault("kill", "between buckets"), Fault("stop", "backward", 0)]
POSSIBLE = [
    fault
    for fault in all_faults(0) + all_faults(1)
    # the store is inside rank 0, and mpiexec has done what a rendezvous is for
    if fault.kind != "store" and fault.point != "before rendezvous"
    # after its last step a rank may take its time: MPI has the others wait for it when they end
    if (fault.kind, fault.point) != ("hang", "shutdown")
]


def run_once(folder: Path, fault: Fault | None = None, is_resumed: bool = False) -> tuple[int, str]:
    """Run two ranks to their end; returns the exit code of ``mpiexec``, and all that was said."""
    for leftover in [folder / STRUCK, *folder.glob("outcome-*.json")]:
        leftover.unlink(missing_ok=True)
    (folder / _TASK).write_bytes(pickle.dumps(Assignment(folder, -1, 2, "mpi", 0, 0, fault, is_resumed, OPTIONS)))
    with (folder / "mpiexec.txt").open("w") as output:
        process = subprocess.Popen(
            [str(_MPIEXEC), "-n", "2", sys.executable, __file__, str(folder / _TASK)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(process, folder, fault)
        left = members_of(folder)
        assert not left, f"{fault}: a process is left: {left}"
    finally:
        for member in members_of(folder):
            os.kill(member, signal.SIGKILL)
        process.wait()
    assert not left_in_memory([process.pid])
    told = [folder / "mpiexec.txt", *sorted(folder.glob("out*-*"))]
    return process.returncode, "\n".join(path.read_text(errors="replace")[-3000:] for path in told)


def members_of(folder: Path) -> list[int]:
    """The living processes of a run: the launcher, its helpers, which have sessions of their own, and the ranks."""
    task, found = os.fsencode(folder / _TASK), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if task in (entry / "cmdline").read_bytes() and state_of(int(entry.name)) != "Z":
                found.append(int(entry.name))
    return found


def _wait(process: "subprocess.Popen[bytes]", folder: Path, fault: Fault | None) -> None:
    """Wait for the end; once the fault has struck, only for so long."""
    until_s = time.monotonic() + _UNDISTURBED_S
    struck_s: float | None = None
    while process.poll() is None:
        now_s = time.monotonic()
        if struck_s is None and (folder / STRUCK).exists():
            struck_s = now_s
        if fault is not None and struck_s is not None and fault.kind not in HARMLESS:
            until_s = min(until_s, struck_s + _limit_s(fault) + PATIENCE_S)
        if fault is not None and fault.kind in ("pause", "stop") and struck_s is not None:
            for member in members_of(folder):
                if now_s - struck_s > stop_s(fault) and state_of(member) == "T":
                    os.kill(member, signal.SIGCONT)
        assert now_s < until_s, f"{fault}: the ranks do not end\n{(folder / 'mpiexec.txt').read_text()}"
        time.sleep(0.1)


def _limit_s(fault: Fault) -> float:
    """How long the other rank may wait; for one that writes a checkpoint it has more patience."""
    is_excused = fault.kind == "hang" and fault.point == "saving"
    return max(SOFT_LIMIT_S, START_LIMIT_S, _EXCUSED_LIMITS * SOFT_LIMIT_S if is_excused else 0.0)


def check(folder: Path, fault: Fault, unbroken: list[float]) -> None:
    """Strike a run with a fault, check how it ends, resume it, and compare with the unbroken one."""
    write_text(folder)
    code, story = run_once(folder, fault)
    if not (folder / STRUCK).exists() or fault.kind in HARMLESS or (code == 0 and fault.may_be_survived):
        assert code == 0, f"{fault} should be survived\n{story}"
        assert losses(config_of(folder)) == unbroken
        return
    if fault.point != "shutdown":
        assert code != 0, f"{fault}: mpiexec reports nothing\n{story}"
        signs = {
            "raise": "the injected failure",
            "kill": "signal 9",
            "corrupt": "signal 9",
            "disk": "could not be written",
            "drop": "mpiexec",  # ranks hold its connections as well, and it can only say that these are closed
        }
        sign = signs.get(fault.kind, f"rank {fault.rank}")
        says_so_itself = fault.kind == "descriptors" and "files open that it may" in story
        assert says_so_itself or sign.lower() in story.lower(), f"{fault} is not named\n{story}"
    code, story = run_once(folder, None, any((folder / "run").glob("*")))
    assert code == 0, f"after {fault} the run cannot go on\n{story}"
    assert losses(config_of(folder)) == unbroken, f"after {fault} the run goes on in another way"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("unbroken")
    write_text(folder)
    code, story = run_once(folder)
    assert code == 0, story
    return losses(config_of(folder))


@pytest.mark.slow
@pytest.mark.parametrize("fault", IN_CI, ids=str)
def test_struck(tmp_path: Path, unbroken: list[float], fault: Fault) -> None:
    check(tmp_path, fault, unbroken)


@pytest.mark.stress
@pytest.mark.parametrize("fault", POSSIBLE, ids=str)
def test_every_combination(tmp_path: Path, unbroken: list[float], fault: Fault) -> None:
    check(tmp_path, fault, unbroken)


if __name__ == "__main__":
    from fault_rank import under_mpiexec

    under_mpiexec(pickle.loads(Path(sys.argv[1]).read_bytes()))
