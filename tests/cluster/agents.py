"""torchrun agents as processes of a test: started, watched, and killed as whole hosts are."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PATIENCE_S = 180.0
_SOURCE = Path(__file__).parents[2] / "src"


class Agent:
    """One torchrun with its workers, in a session of its own; its output goes to a file."""

    def __init__(self, command: Sequence[str], log: Path, **variables: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_SOURCE), "NO_COLOR": "1", **variables}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see docs/clusters.md
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def workers(self) -> list[int]:
        """The processes that it has started itself."""
        return [pid for pid, parent in _processes() if parent == self.process.pid]

    def kill(self) -> None:
        """End it and all of its processes at once, as a power cut would."""
        for pid in [self.process.pid, *_descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def torchrun(endpoint: str, max_hosts: int, *training: str) -> list[str]:
    """The command of one host of an elastic run whose rendezvous somebody else serves.

    Without ``--`` torchrun would take the command's ``--run`` for a shortened option of its own.
    """
    settings = "is_host=0,last_call_timeout=1,join_timeout=60"
    return [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{max_hosts}", "--nproc-per-node=1"),
        *("--max-restarts=20", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=test"),
        *("--rdzv-conf", settings, "--monitor-interval=0.1", "-m", "--", *training),
    ]


def wait_until(holds: Callable[[], bool], what: str, agents: Sequence[Agent]) -> None:
    """Wait for something that happens for certain unless something is broken."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline or all(agent.process.poll() is not None for agent in agents):
            stories = "\n".join(f"--- {agent.log.name}\n{agent.output()[-4000:]}" for agent in agents)
            raise AssertionError(f"never happened: {what}\n{stories}")
        time.sleep(0.05)


def _descendants(ancestor: int) -> list[int]:
    children = [pid for pid, parent in _processes() if parent == ancestor]
    return [*children, *(pid for child in children for pid in _descendants(child))]


def _processes() -> list[tuple[int, int]]:
    """Process and parent of everything that is alive (Linux)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found.append((int(folder.name), int(parent)))
    return found
