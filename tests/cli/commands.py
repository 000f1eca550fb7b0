"""The ``gradsync`` command in processes of its own, as a user starts it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TIMEOUT_S = 240

# Small enough to take no time, large enough to go wrong in every way.
SMALL = [
    *("--context", "16", "--batch-tokens", "128", "--width", "16", "--heads", "2", "--layers", "1"),
    *("--eval-tokens", "256", "--sample-tokens", "8", "--warmup-steps", "2", "--tensorboard", "false"),
]


def environment() -> dict[str, str]:
    source = Path(__file__).parents[2] / "src"
    settings = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    # As where the user sets nothing: numpy has a thread of its own before a command does anything.
    settings["OPENBLAS_NUM_THREADS"] = "2"
    return {**os.environ, **settings}


def gradsync(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command of ours to its end."""
    return python("-m", "gradsync", *arguments, cwd=cwd)


def python(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run Python to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@contextmanager
def running(*arguments: str, cwd: Path) -> Iterator["subprocess.Popen[str]"]:
    """A command under way; whatever is left of it at the end is killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gradsync", *arguments],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for member in session_members(process.pid):
            os.kill(member, signal.SIGKILL)
        process.communicate()


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something that happens for certain unless something is broken."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.05)


def session_members(leader: int, but_children_of: int = 0) -> list[int]:
    """Every living process of a session, if wanted without the children of one of them (Linux)."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it has ended meanwhile
        if int(session) == leader and state != "Z" and int(parent) != but_children_of:
            members.append(int(folder.name))
    return members


def rank_processes(launcher: int) -> list[int]:
    """The ranks that a launcher in a session of its own has started: the children of its children."""
    return [member for member in session_members(launcher, but_children_of=launcher) if member != launcher]
