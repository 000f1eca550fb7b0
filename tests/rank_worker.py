"""One rank of a RankPool: joins a gloo group, then runs the jobs that its pipe brings.

This file runs in the worker processes. It knows nothing of pytest and decides nothing: whether a
failure is expected, and what becomes of the pool, is the parent's affair (``rank_pool.py``).
"""

import faulthandler
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Generous: a machine on which other tests run beside may take long for what takes no time.
GROUP_TIMEOUT_S = 60.0
CLOSING_BARRIER_TIMEOUT_S = 10.0
EXIT_MARGIN_S = 15.0
# The first message of a rank: it has joined the group.
READY = "ready"


@dataclass(frozen=True)
class Job:
    """What a rank is asked to run; ``call`` is the pickled (fn, args, kwargs)."""

    call: bytes
    sys_path: list[str]
    timeout_s: float
    warnings_as_errors: bool


@dataclass(frozen=True)
class Reply:
    """What a rank made of a job: a pickled value, or the exception as text."""

    value: bytes | None
    type_name: str
    text: str
    traceback: str
    seconds: float
    warnings: list[str]
    sequence: int | None


def stack_path(folder: Path, rank: int) -> Path:
    """Where a rank's stacks are written when it is sent SIGUSR1."""
    return folder / f"stacks-{rank}.txt"


def output_path(folder: Path, rank: int) -> Path:
    """Where a rank's stdout and stderr go."""
    return folder / f"output-{rank}.txt"


def worker_main(rank: int, world: int, folder: Path, connection: Connection) -> None:
    """Join the group and serve jobs until the parent closes the pipe."""
    _redirect_output(output_path(folder, rank))
    with stack_path(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        _join_group(rank, world, folder)
        try:
            connection.send(READY)
            while True:
                connection.send(_serve(rank, world, connection.recv()))
        except (EOFError, ConnectionError):
            os._exit(0)  # the parent is gone or done: no tidying that could wait for a peer


def closing_barrier(rank: int, world: int) -> None:
    """Show that no rank has a collective outstanding that its peers never joined."""
    dist.group.WORLD.barrier(timeout=timedelta(seconds=CLOSING_BARRIER_TIMEOUT_S)).wait()  # type: ignore[union-attr]


def _redirect_output(path: Path) -> None:
    target = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)


def _join_group(rank: int, world: int, folder: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
    )


def _serve(rank: int, world: int, job: Job) -> Reply:
    started = time.monotonic()
    # A worker whose parent was killed in the middle of a job must not live on.
    faulthandler.dump_traceback_later(job.timeout_s + EXIT_MARGIN_S, exit=True)
    value, type_name, text, trace = None, "", "", ""
    recorded: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("error" if job.warnings_as_errors else "always")
            value = pickle.dumps(_run(rank, world, job))
    except BaseException as error:  # SystemExit and KeyboardInterrupt are results too
        type_name, text, trace = type(error).__name__, _chain_text(error), traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
    seconds = time.monotonic() - started
    notes = [f"{seen.category.__name__}: {seen.message}" for seen in recorded]
    return Reply(value, type_name, text, trace, seconds, notes, _sequence())


def _run(rank: int, world: int, job: Job) -> Any:
    sys.path[:] = job.sys_path
    fn: Callable[..., Any]
    fn, args, kwargs = pickle.loads(job.call)
    random.seed(0)
    torch.manual_seed(0)
    return fn(rank, world, *args, **kwargs)


def _chain_text(error: BaseException) -> str:
    """The messages of an exception and of all that led to it, newest first."""
    lines: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        lines.append("".join(traceback.format_exception_only(current)).strip())
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\ncaused by: ".join(lines)


def _sequence() -> int | None:
    """How many operations the default group has issued, None where a job has destroyed it."""
    if not dist.is_initialized():
        return None
    return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
