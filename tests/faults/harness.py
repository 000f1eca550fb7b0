"""Runs of several ranks, some of which a fault strikes, and what must hold afterwards."""

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import fault_rank
from fault_rank import SOFT_LIMIT_S, START_LIMIT_S, Assignment, config_of
from injector import HARMLESS, PAUSE_S, STRUCK, Fault

from training_jobs import losses, write_text

PATIENCE_S = 10.0
"""How long after the limit all ranks must have ended."""

_UNDISTURBED_S = 60.0
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Outcome:
    """How one rank ended; ``kind`` is the class of its exception, empty if there was none or no record."""

    exit_code: int | None
    kind: str
    text: str
    output: str


def run_once(
    folder: Path,
    backend: str,
    fault: Fault | None = None,
    is_resumed: bool = False,
    serves_itself: bool = False,
    **options: Any,
) -> list[Outcome]:
    """Run two ranks to their end; those that do not end are an error.

    ``serves_itself``: the store is in rank 0, as where no launcher serves one, and is lost with it.
    """
    for leftover in folder.glob("outcome-*.json"):
        leftover.unlink()
    with _store(2, serves_itself) as (port, store_pid):
        tasks = [Assignment(folder, rank, 2, backend, port, store_pid, fault, is_resumed, options) for rank in range(2)]
        ranks = [_start(task) for task in tasks]
        sessions = [process.pid for process in ranks]
        try:
            _wait(ranks, fault)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
    outcomes = [_outcome(folder, rank, process) for rank, process in enumerate(ranks)]
    assert not members(sessions), f"{fault}: a process is left"
    left = left_in_memory(sessions)
    assert not left, f"{fault}: something is left in /dev/shm: {left}"
    return outcomes


def check(
    folder: Path, backend: str, fault: Fault, unbroken: list[float], serves_itself: bool = False, **options: Any
) -> None:
    """Strike a run with a fault, check how it ends, resume it, and compare with the unbroken one."""
    write_text(folder)
    outcomes = run_once(folder, backend, fault, False, serves_itself, **options)
    story = "\n".join(f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes))
    has_struck = (folder / STRUCK).exists()
    is_over = all(outcome.exit_code == 0 for outcome in outcomes)
    if not has_struck or fault.kind in HARMLESS or (is_over and fault.may_be_survived):
        assert is_over, f"{fault} should be survived\n{story}"
        assert losses(config_of(folder)) == unbroken
        return
    check_named(fault, outcomes, story)
    is_resumed = (folder / "run").exists() and any((folder / "run").iterdir())
    resumed = run_once(folder, backend, None, is_resumed, serves_itself, **options)
    assert [outcome.exit_code for outcome in resumed] == [0, 0], f"after {fault} the run cannot go on\n{resumed}"
    assert losses(config_of(folder)) == unbroken, f"after {fault} the run goes on in another way"


def check_named(fault: Fault, outcomes: list[Outcome], story: str) -> None:
    struck, other = outcomes[fault.rank], outcomes[1 - fault.rank]
    """Check that no rank ends in peace, and that the one that was not struck names the other."""
    if fault.point == "shutdown" or (fault.kind == "descriptors" and struck.exit_code == 0):
        return  # the other rank had all it needed, or nothing had to be opened any more
    assert struck.exit_code != 0, f"{fault}: the rank that was struck ends in peace\n{story}"
    assert other.exit_code != 0, f"{fault}: the other rank does not notice\n{story}"
    assert f"rank {fault.rank}" in other.text or f"ranks {fault.rank}" in other.text, f"{fault} is not named\n{story}"
    if fault.kind == "raise" and fault.point != "before rendezvous":  # nobody can hear it before
        assert "the injected failure" in other.text, f"{fault}: its text does not reach the other rank\n{story}"


def _wait(ranks: list[BaseProcess], fault: Fault | None) -> None:
    """Wait for the end of all ranks; once a first one has ended, or the fault has struck, only for so long."""
    limit_s = max(SOFT_LIMIT_S, START_LIMIT_S) + PATIENCE_S if fault is not None else _UNDISTURBED_S
    started_s = time.monotonic()
    ended_s: float | None = None
    while alive := [process for process in ranks if process.is_alive()]:
        connection.wait([process.sentinel for process in alive], 0.1)
        now_s = time.monotonic()
        if fault is not None and fault.kind in ("pause", "stop"):
            _continue_stopped(alive, stop_s(fault), len(alive) < len(ranks))
        if fault is not None and fault.kind == "hang" and len(alive) < len(ranks):
            ranks[fault.rank].kill()  # as the launcher does then; nothing else ends a sleep
        if ended_s is None and len(alive) < len(ranks):
            ended_s = now_s
        if ended_s is not None and now_s - ended_s > limit_s or now_s - started_s > _UNDISTURBED_S + limit_s:
            raise AssertionError(f"{fault}: rank(s) {[ranks.index(process) for process in alive]} do not end")


def stop_s(fault: Fault) -> float:
    """How long a rank is stopped: shorter or longer than the others wait for it."""
    if fault.kind == "pause":
        return PAUSE_S
    return (START_LIMIT_S if fault.point == "before rendezvous" else SOFT_LIMIT_S) + 9  # 5 s are the store's


_stopped_since: dict[int, float] = {}


def _continue_stopped(alive: list[BaseProcess], after_s: float, is_awaited: bool) -> None:
    for process in alive:
        pid = process.pid or 0
        if state_of(pid) != "T":
            _stopped_since.pop(pid, None)
        elif time.monotonic() - _stopped_since.setdefault(pid, time.monotonic()) > after_s or is_awaited:
            os.kill(pid, signal.SIGCONT)


def _start(task: Assignment) -> BaseProcess:
    process = context().Process(target=fault_rank.main, args=(task,), daemon=True)
    process.start()
    return process


def context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "torch.nn.parallel", "gradsync.train.job", "injector"]
    )
    os.environ.update(_ENVIRONMENT)
    return context


@contextmanager
def _store(world: int, serves_itself: bool) -> Iterator[tuple[int, int | None]]:
    """A store in a process of its own, so that it can be stopped; its port and process. Or rank 0 serves it."""
    if serves_itself:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        yield port, None
        return
    ours, theirs = multiprocessing.Pipe()
    process = context().Process(target=_serve, args=(world, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv(), process.pid
    finally:
        process.kill()
        process.join()


def _serve(world: int, pipe: Any) -> None:
    from gradsync.comm.store import serve_store

    store = serve_store("127.0.0.1", 0, world, timedelta(seconds=60))
    pipe.send(store.port)
    time.sleep(3600)


def _outcome(folder: Path, rank: int, process: BaseProcess) -> Outcome:
    path = folder / f"outcome-{rank}.json"
    output = (folder / f"output-{rank}.txt").read_text(errors="replace")[-2000:]
    found = json.loads(path.read_text() or "{}") if path.exists() else {}
    return Outcome(process.exitcode, found.get("kind", ""), found.get("text", ""), output)


def left_in_memory(processes: list[int | None]) -> list[str]:
    """What lies in /dev/shm that these processes, or gradsync, may have left there."""
    names = os.listdir("/dev/shm")
    return [name for name in names if "gradsync" in name or any(f"torch_{pid}" in name for pid in processes)]


def members(sessions: list[int | None]) -> list[int]:
    """The living processes of sessions."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) in sessions and state != "Z":
            members.append(int(entry.name))
    return members


def state_of(pid: int) -> str:
    """How the kernel spells what a process does; ``T`` is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
