"""Starts a function on processes of this machine, and sees to it that all of them end.

The ranks meet through a store that this process serves on the loopback interface, reachable from nowhere else. Each
leaves its result, or its failure, in a folder.

[Note: Fork server] On Linux a server process imports torch while this one does, and the ranks are forked from it:
three imports become two, side by side. Elsewhere every rank imports for itself.

[Note: The end] After the first rank that has failed the others get some time: they learn of it through the store, have
their own word to leave, and end by themselves. A rank that is still there then is asked to (SIGTERM, and SIGCONT, for
a stopped process acts on nothing else); one that does not is killed, and what it has started with it.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from gradsync.cli.failures import Failure, cause, failure_of, raised_again, record, recorded, silent_failure
from gradsync.cli.main import EXIT_INTERRUPTED
from gradsync.cli.parent import die_with_parent
from gradsync.comm.interfaces import LOOPBACK

_START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
_STORE_TIMEOUT = timedelta(seconds=300)
_GRACE_S = 1.0
_TERMINATE_S = 5.0
_LOOK_S = 0.5


@dataclass(frozen=True)
class Patience:
    """Seconds that ranks get to end by themselves once one has failed, and then after they were asked to."""

    grace_s: float = _GRACE_S
    terminate_s: float = _TERMINATE_S


class RankLostError(Exception):
    """A rank has failed; ``failure`` is the one behind the others."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def run_ranks(entry: Any, nproc: int, job: Any) -> dict[int, Any]:
    """Run ``entry(job)`` on ``nproc`` local processes and return their results by rank.

    Raises:
        GradsyncError: a process failed; its error is shown.
        KeyboardInterrupt: the user has pressed Ctrl-C.
        SystemExit: this process was asked to end by another signal.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with _signals_as_exits(), tempfile.TemporaryDirectory(prefix="gradsync-") as folder:
        start_fork_server()
        try:
            return run_processes(entry, nproc, (job,), Path(folder))
        except RankLostError as error:
            raise raised_again(error.failure) from error


def start_fork_server() -> None:
    """See [Note: Fork server]; again: no effect."""
    start_resource_tracker()
    if _START_METHOD == "forkserver":
        from multiprocessing import forkserver

        multiprocessing.set_forkserver_preload(["gradsync.cli.preload"])
        forkserver.ensure_running()


def start_resource_tracker() -> None:
    """Start the process that removes our semaphores when we are killed, and have it do so without a word."""
    quiet = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(quiet)  # handed to the process as -W
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(quiet)


def run_processes(
    entry: Any, nproc: int, arguments: tuple[Any, ...], folder: Path, patience: Patience = Patience()
) -> dict[int, Any]:
    """Run ``entry(*arguments)`` on ``nproc`` processes, which leave their files in ``folder``; return the results.

    Raises:
        RankLostError: one has failed, and all have ended.
    """
    from gradsync.comm.store import serve_store

    store = serve_store(LOOPBACK, 0, 1, _STORE_TIMEOUT)
    context: Any = multiprocessing.get_context(_START_METHOD)
    places = [_environment(rank, nproc, store.port) for rank in range(nproc)]
    ranks = [context.Process(target=_be_rank, args=(entry, arguments, place, folder)) for place in places]
    try:
        for rank in ranks:
            rank.start()
        lost = _first_to_fail(ranks)
        if lost is not None:
            _await(ranks, patience.grace_s, is_for_stopped=False)
    finally:
        _end(ranks, patience.terminate_s)
    if lost is not None:
        raise RankLostError(cause(recorded(folder), lost, ranks[lost].exitcode or 0))
    return {rank: _result(folder, rank) for rank in range(nproc)}


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """What a rank reads its place from; the store is this process's and outlives the ranks."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _be_rank(entry: Any, arguments: tuple[Any, ...], environment: dict[str, str], folder: Path) -> None:
    os.environ.update(environment)
    die_with_parent()
    rank = int(environment["RANK"])
    try:
        result = entry(*arguments)
    except KeyboardInterrupt:
        os._exit(EXIT_INTERRUPTED)  # the terminal tells every process; the launcher answers to the user
    except Exception as error:  # noqa: BLE001 - the launcher tells it
        from gradsync.comm.last_words import end_now

        failure = failure_of(rank, error)
        record(folder, failure)
        end_now(failure.exit_code)
    path = _result_file(folder, rank)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(result))
    unfinished.rename(path)


def _result(folder: Path, rank: int) -> Any:
    path = _result_file(folder, rank)
    if not path.exists():
        raise RankLostError(silent_failure(rank, 0))
    return pickle.loads(path.read_bytes())


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.result"


def _first_to_fail(ranks: Sequence[BaseProcess]) -> int | None:
    """Wait until all have ended well, or one has not: return which."""
    running: dict[Any, int] = {rank.sentinel: number for number, rank in enumerate(ranks)}
    while running:
        for sentinel in connection.wait(list(running)):
            number = running.pop(sentinel)
            ranks[number].join()
            if ranks[number].exitcode:
                return number
    return None


def _await(ranks: Iterable[BaseProcess], limit_s: float, is_for_stopped: bool = True) -> bool:
    """Wait for the ends of all ranks; returns whether they have ended within the limit."""
    until = time.monotonic() + limit_s
    while True:
        alive = [rank for rank in ranks if rank.is_alive()]
        left_s = until - time.monotonic()
        if not alive or left_s <= 0 or not (is_for_stopped or any(not _is_stopped(rank) for rank in alive)):
            return not alive
        connection.wait([rank.sentinel for rank in alive], min(left_s, _LOOK_S))


def _is_stopped(rank: BaseProcess) -> bool:
    """Whether a process is stopped, by Ctrl-Z say; False where the system does not tell."""
    try:
        return Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _end(ranks: Sequence[BaseProcess], limit_s: float) -> None:
    """See [Note: The end]."""
    begun = [rank for rank in ranks if rank.pid is not None]
    for number in (signal.SIGTERM, signal.SIGCONT):
        for rank in begun:
            _send(rank, number)
    if _await(begun, limit_s):
        return
    for rank in begun:
        if rank.is_alive():
            families = _descendants(rank.pid or 0)
            rank.kill()
            for pid in families:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    _await(begun, limit_s)


def _send(rank: BaseProcess, number: signal.Signals) -> None:
    if rank.is_alive():
        with suppress(ProcessLookupError):
            os.kill(rank.pid or 0, number)


def _descendants(ancestor: int) -> list[int]:
    """The processes that a process has started, and theirs; none where the system does not tell."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(ancestor, []))
    for pid in found:  # grows while it is gone through
        found += children.get(pid, [])
    return found


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Have the signals that ask for an end raise SystemExit, so that the ranks are seen to."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
