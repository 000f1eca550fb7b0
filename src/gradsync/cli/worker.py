"""One rank of ``gradsync train``: a process that may be alone, started by us, or started by torchrun.

Sets up what belongs to the process (threads, device, signals, process group), runs the job, and
prints the results on rank 0. What becomes of an exception differs: alone it goes to the command line,
under torchrun this rank prints it, under our launcher it is recorded for the launcher to print once.
"""

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch

from gradsync.cli.main import EXIT_FAILED, EXIT_INTERRUPTED, exit_code_of, fail
from gradsync.cli.parent import die_with
from gradsync.errors import ConfigError, GradsyncError
from gradsync.observe.progress import Silent, View, open_view
from gradsync.train.config import TrainConfig
from gradsync.train.interrupt import StopReason, StopRequests, listening
from gradsync.train.job import Job, Place
from gradsync.train.ranks import Alone, Group, Ranks
from gradsync.train.runfolder import RunFolder, new_run_path
from gradsync.train.trainer import Outcome

EXIT_TERMINATED = 143
STOP_WORD = "stop"

_PROGRAM = "gradsync train"
_EXIT_CODES = {StopReason.NONE: 0, StopReason.INTERRUPT: EXIT_INTERRUPTED, StopReason.TERMINATE: EXIT_TERMINATED}
# torchrun hands on the Ctrl-C that the terminal has sent to every process already.
_TORCHRUN_REPEAT_S = 1.0
_AFTERMATH_S = 1.0


@dataclass(frozen=True)
class Failure:
    """What became of a rank: for the launcher, which prints one of them."""

    rank: int
    kind: str
    message: str
    trace: str
    exit_code: int
    is_expected: bool
    is_aftermath: bool


def run_alone(config: TrainConfig) -> int:
    """Train in this process alone, without a process group."""
    requests = StopRequests()
    try:
        with listening(requests):
            outcome = _train(config, Alone(), requests)
    except GradsyncError:
        raise
    except Exception as error:  # noqa: BLE001 - shown as one line, kept whole in the run folder
        failure = _failure(0, error)
        keep_trace(config, failure)
        return fail(_PROGRAM, describe(failure, config), failure.exit_code)
    return exit_code(outcome)


def join(config: TrainConfig) -> int:
    """Train as one of the ranks that torchrun (or another launcher with its environment) has started."""
    requests = StopRequests()
    rank = int(os.environ["RANK"])
    try:
        with listening(requests, _TORCHRUN_REPEAT_S):
            outcome = _train_in_group(config, requests)
    except Exception as error:  # noqa: BLE001
        failure = _failure(rank, error)
        keep_trace(config, failure)
        # What all ranks refused together is said once.
        if rank == 0 or not failure.is_expected:
            fail(_PROGRAM, describe(failure, config), failure.exit_code)
        _exit_now(failure.exit_code)
    return exit_code(outcome)


def run_local_rank(config: TrainConfig, control: Path, launcher: int) -> Outcome:
    """Train as one of the ranks that our launcher has started; its word to stop is a file in ``control``."""
    die_with(launcher)
    requests = StopRequests(control / STOP_WORD)
    rank = int(os.environ["RANK"])
    # The terminal's Ctrl-C and hang-up reach every process; what is to be done is the launcher's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening(requests):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGTERM})
            return _train_in_group(config, requests)
    except Exception as error:  # noqa: BLE001
        failure = _failure(rank, error)
        if failure.is_aftermath:
            time.sleep(_AFTERMATH_S)  # let the launcher notice the rank first that was lost
        (control / f"rank-{rank}.json").write_text(json.dumps(asdict(failure)), encoding="utf-8")
        _exit_now(failure.exit_code)


def exit_code(outcome: Outcome) -> int:
    """Return the exit code for the way a run ended."""
    return _EXIT_CODES[outcome.reason]


def describe(failure: Failure, config: TrainConfig) -> str:
    """Return the one line about a failure; with ``--debug`` the traceback follows."""
    message = failure.message if failure.is_expected else f"rank {failure.rank}: {failure.kind}: {failure.message}"
    if config.debug:
        return f"{message}\n{failure.trace}"
    log = RunFolder(config.run or "").error_log
    return message if failure.is_expected or not log.exists() else f"{message} (traceback in {log})"


def keep_trace(config: TrainConfig, failure: Failure) -> None:
    """Append the traceback of an unexpected failure to the run folder's log, if there is a run folder."""
    log = RunFolder(config.run or "").error_log
    if failure.is_expected or not config.run or not log.parent.is_dir():
        return
    with log.open("a", encoding="utf-8") as file:
        file.write(f"rank {failure.rank}\n{failure.trace}\n")


def _train_in_group(config: TrainConfig, requests: StopRequests) -> Outcome:
    from gradsync.comm.process import destroy_process_group, init_process_group

    device = _device(config)
    view = _open_view(config) if int(os.environ["RANK"]) == 0 else Silent()
    with _logging_to(view):
        init_process_group("gloo" if config.backend == "auto" and device.type == "cpu" else config.backend)
    ranks = Group()
    config = replace(config, run=config.run or ranks.from_first(new_run_path(config.preset)))
    outcome = _train(config, ranks, requests, view)
    # Only after success: after a failure the other end may never answer.
    destroy_process_group()
    return outcome


def _train(config: TrainConfig, ranks: Ranks, requests: StopRequests, view: View | None = None) -> Outcome:
    _set_threads(config)
    device = _device(config)
    view = view or _open_view(config)
    try:
        outcome = Job(config, Place(ranks, device, view, requests)).run()
    finally:
        view.close()
    if ranks.rank == 0:
        _print_results(outcome)
    return outcome


def _print_results(outcome: Outcome) -> None:
    if not outcome.is_finished:
        print(f"stopped after step {outcome.step} of {outcome.total_steps}; go on with:")
        print(f"  gradsync train --run {outcome.run} --resume", flush=True)
        return
    loss = "" if outcome.val_loss is None else f", validation loss {outcome.val_loss:.4f} nats per token"
    print(f"finished step {outcome.step} of {outcome.total_steps}{loss}")
    if outcome.sample is not None:
        print(f"--- sample ---\n{outcome.sample}\n--------------")
    print(f'more samples: gradsync sample {outcome.run} --prompt "..."', flush=True)


def _device(config: TrainConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cpu" or (config.device == "auto" and not has_cuda):
        return torch.device("cpu")
    if not has_cuda:
        raise ConfigError("--device cuda: torch sees no CUDA device on this machine; use --device cpu or auto")
    # The local rank: the global one counts the devices of other machines, too.
    index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"local rank {index} has no CUDA device: there are {count}; start at most {count} processes")
    torch.cuda.set_device(index)
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda", index)


def _set_threads(config: TrainConfig) -> None:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def _open_view(config: TrainConfig) -> View:
    return open_view(config.progress, sys.stderr, config.log_every)


@contextmanager
def _logging_to(view: View) -> Iterator[None]:
    """Show what the library logs on the way to a process group."""

    class _Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            view.note(record.getMessage())

    logger, handler, level = logging.getLogger("gradsync"), _Notes(), logging.getLogger("gradsync").level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _failure(rank: int, error: Exception) -> Failure:
    is_expected = isinstance(error, GradsyncError)
    return Failure(
        rank=rank,
        kind=type(error).__name__,
        message=str(error),
        trace="".join(traceback.format_exception(error)),
        exit_code=exit_code_of(error) if isinstance(error, GradsyncError) else EXIT_FAILED,
        is_expected=is_expected,
        is_aftermath=_is_aftermath(error),
    )


def _is_aftermath(error: BaseException | None) -> bool:
    """Whether an error only tells that another rank was lost."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, torch.distributed.DistError) or "peer" in text or "connection" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def _exit_now(code: int) -> NoReturn:
    # Not through the interpreter's shutdown: a process group with work under way may hang there.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
