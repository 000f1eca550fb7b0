"""RankPool: real ranks (processes with a gloo group) that are started once and run many jobs.

A job is a module-level function, called on every rank as ``fn(rank, world, *args, **kwargs)``; the
pool returns the list of results. It never trusts ranks that have failed: after an exception, a death
or a hang the next job gets new processes. The ranks' side is in ``rank_worker.py``.

New processes are forked from a server that has imported torch already, so a new pool takes a fraction
of a second.
"""

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import rank_worker
from rank_worker import Job, Reply

DEFAULT_TIMEOUT_S = 90.0
# How long the others may take once one rank has failed: they mostly wait for it in a collective.
GRACE_S = 10.0
STACK_WAIT_S = 2.0
START_TIMEOUT_S = 120.0
OUTPUT_TAIL_CHARS = 4000

_WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    ``type_name`` is the exception's class, or "Died" or "Hung"; ``text`` holds the messages of the
    exception and of those that caused it, newest first; ``traceback`` all there is to show.
    """

    type_name: str
    text: str
    traceback: str
    seconds: float


class RankJobError(Exception):
    """A job failed; the message holds every rank's story, ``failures`` the same by rank."""

    def __init__(self, message: str, failures: dict[int, RankFailure]) -> None:
        super().__init__(message)
        self.failures = failures


class RankHangError(RankJobError):
    """A rank did not finish in time; the message holds every rank's stacks."""


class RankPool:
    """Processes of one gloo group, started with the first job and replaced after each failure."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[connection.Connection] = []
        self._folder: Path | None = None

    def __call__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        warnings_as_errors: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``fn`` on every rank and return the results by rank; RankJobError if any rank fails."""
        replies = self._execute(fn, args, kwargs, timeout_s, warnings_as_errors, grace_s=GRACE_S)
        return [_value(reply) for reply in self._successes(fn, replies)]

    run = __call__

    def run_with_warnings(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs: Any
    ) -> list[tuple[Any, list[str]]]:
        """Like a plain run, with each rank's warnings as "Category: message" beside its result."""
        replies = self._execute(fn, args, kwargs, timeout_s, False, grace_s=GRACE_S)
        return [(_value(reply), reply.warnings) for reply in self._successes(fn, replies)]

    def run_expecting(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        warnings_as_errors: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a job in which ranks may raise or die: per rank its result, or a RankFailure.

        A rank that hangs is still an error. The processes are replaced afterwards.
        """
        replies = self._execute(fn, args, kwargs, timeout_s, warnings_as_errors, grace_s=timeout_s)
        self.close()
        outcomes = [reply if isinstance(reply, RankFailure) else _outcome(reply) for reply in replies]
        if any(isinstance(outcome, RankFailure) and outcome.type_name == "Hung" for outcome in outcomes):
            raise _error(fn, self.world, outcomes)
        return outcomes

    def close(self) -> None:
        """Kill the ranks; the next job starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], None

    def process_ids(self) -> list[int | None]:
        """The process of each rank; empty when none is running."""
        return [process.pid for process in self._processes]

    def _successes(self, fn: Callable[..., Any], replies: list[Reply | RankFailure]) -> list[Reply]:
        outcomes = [reply if isinstance(reply, RankFailure) else _outcome(reply) for reply in replies]
        if any(isinstance(outcome, RankFailure) for outcome in outcomes):
            self.close()
            raise _error(fn, self.world, outcomes)
        succeeded = [reply for reply in replies if isinstance(reply, Reply)]
        self._check_in_step(fn, [reply.sequence for reply in succeeded])
        return succeeded

    def _check_in_step(self, fn: Callable[..., Any], sequences: list[int | None]) -> None:
        """Refuse a job after which some rank waits for a collective that others never issued.

        Different numbers alone prove nothing, since sends and receives count too.
        """
        if None in sequences:
            self.close()
        elif len(set(sequences)) > 1 and fn is not rank_worker.closing_barrier:
            try:
                self(rank_worker.closing_barrier)
            except RankJobError as error:
                numbers = ", ".join(f"rank {rank}: {number}" for rank, number in enumerate(sequences))
                message = f"{_name(fn)} left its ranks out of step: operations on the group were {numbers}"
                raise RankJobError(message, error.failures) from error

    def _execute(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float,
        warnings_as_errors: bool,
        grace_s: float,
    ) -> list[Reply | RankFailure]:
        job = Job(pickle.dumps((fn, args, kwargs)), list(sys.path), timeout_s, warnings_as_errors)
        try:
            if not all(process.is_alive() for process in self._processes):
                self.close()
            if not self._processes:
                self._start()
            started = time.monotonic()
            for pipe in self._pipes:
                # A rank that has died meanwhile is noticed when its answer is read.
                with contextlib.suppress(ConnectionError):
                    pipe.send(job)
            return self._collect(started, timeout_s, grace_s)
        except BaseException:  # an interrupt or a test's time-out leaves ranks in the middle of a job
            self.close()
            raise

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch.nn.parallel"])
        with _environment(_WORKER_ENVIRONMENT):
            forkserver.ensure_running()
        self._folder = Path(tempfile.mkdtemp(prefix="rank-pool-"))
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_worker.worker_main,
                args=(rank, self.world, self._folder, theirs),
                name=f"rank-{rank}-of-{self.world}",
                daemon=True,
            )
            process.start()
            theirs.close()  # so that the death of the rank ends the pipe
            self._processes.append(process)
            self._pipes.append(ours)
        for rank in range(self.world):
            self._await_ready(rank)

    def _await_ready(self, rank: int) -> None:
        """Wait until a rank has joined the group, so that a job's time is its own."""
        pipe = self._pipes[rank]
        with contextlib.suppress(EOFError, ConnectionError):
            if pipe.poll(START_TIMEOUT_S) and pipe.recv() == rank_worker.READY:
                return
        raise RuntimeError(f"rank {rank} of {self.world} did not start\n{self._output(rank)}")

    def _collect(self, started: float, timeout_s: float, grace_s: float) -> list[Reply | RankFailure]:
        replies: dict[int, Reply | RankFailure] = {}
        deadline = started + timeout_s
        while len(replies) < self.world:
            pending = [rank for rank in range(self.world) if rank not in replies]
            left = deadline - time.monotonic()
            if left <= 0:
                replies.update(self._stacks(pending, time.monotonic() - started))
                break
            for rank in self._wait(pending, left):
                replies[rank] = self._receive(rank, started)
                if not isinstance(replies[rank], Reply) or replies[rank].type_name:
                    deadline = min(deadline, time.monotonic() + grace_s)
        return [replies[rank] for rank in range(self.world)]

    def _wait(self, pending: list[int], seconds: float) -> list[int]:
        """The ranks among ``pending`` that have answered or died."""
        signs: dict[Any, int] = {self._pipes[rank]: rank for rank in pending}
        signs.update({self._processes[rank].sentinel: rank for rank in pending})
        return sorted({signs[sign] for sign in connection.wait(list(signs), seconds)})

    def _receive(self, rank: int, started: float) -> Reply | RankFailure:
        pipe, process = self._pipes[rank], self._processes[rank]
        try:
            if pipe.poll():
                reply = pipe.recv()
                assert isinstance(reply, Reply)
                return reply
        except (EOFError, ConnectionError):
            pass
        process.join(GRACE_S)
        text = f"Died: the process ended with exit code {process.exitcode}"
        return RankFailure("Died", text, self._output(rank) or text, time.monotonic() - started)

    def _stacks(self, pending: list[int], seconds: float) -> dict[int, RankFailure]:
        """Ask the ranks that did not answer where they are."""
        assert self._folder is not None
        for rank in pending:
            process = self._processes[rank]
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        until = time.monotonic() + STACK_WAIT_S
        failures = {}
        for rank in pending:
            stacks = _settled(rank_worker.stack_path(self._folder, rank), until)
            text = f"Hung: no answer after {seconds:.1f} s"
            failures[rank] = RankFailure("Hung", text, f"{text}\n{stacks}{self._output(rank)}", seconds)
        return failures

    def _output(self, rank: int) -> str:
        assert self._folder is not None
        path = rank_worker.output_path(self._folder, rank)
        text = path.read_text(errors="replace") if path.exists() else ""
        return f"output:\n{text[-OUTPUT_TAIL_CHARS:]}" if text else ""


def _value(reply: Reply) -> Any:
    assert reply.value is not None
    return pickle.loads(reply.value)


def _outcome(reply: Reply) -> Any:
    if reply.type_name:
        return RankFailure(reply.type_name, reply.text, reply.traceback, reply.seconds)
    return _value(reply)


def _error(fn: Callable[..., Any], world: int, outcomes: list[Any]) -> RankJobError:
    failures = {rank: found for rank, found in enumerate(outcomes) if isinstance(found, RankFailure)}
    hung = any(failure.type_name == "Hung" for failure in failures.values())
    lines = [f"{_name(fn)} failed on {len(failures)} of {world} ranks"]
    for rank in range(world):
        story = failures[rank].traceback.rstrip() if rank in failures else "finished"
        lines.append(f"--- rank {rank} of {world} ---\n{story}")
    # An exception comes before the hang of those that waited for the rank that raised it.
    only_hung = hung and all(failure.type_name == "Hung" for failure in failures.values())
    return (RankHangError if only_hung else RankJobError)("\n".join(lines), failures)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _settled(path: Path, until: float) -> str:
    """The text of a file that another process is writing, once it has stopped growing."""
    text = ""
    while time.monotonic() < until:
        time.sleep(0.05)
        newer = path.read_text() if path.exists() else ""
        if newer and newer == text:
            break
        text = newer
    return text


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
