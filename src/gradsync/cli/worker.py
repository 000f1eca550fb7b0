"""One rank of ``gradsync train``: a process that may be alone, started by us, or started by torchrun.

Sets up what belongs to the process (threads, device, signals, process group), runs the job, and
prints the results on rank 0. What becomes of an exception differs: alone it goes to the command line,
under torchrun this rank prints it, under our launcher it is recorded for the launcher to print once.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from gradsync.cli.cores import num_cores
from gradsync.cli.failures import describe, failure_of, keep_trace, record
from gradsync.cli.main import EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_USAGE, fail
from gradsync.cli.speaker import leave_with, let_speak
from gradsync.comm.last_words import end_now, part, tell
from gradsync.comm.watches import watch_of_world
from gradsync.errors import ConfigError, GradsyncError, RankFailedError, StalledError
from gradsync.observe.progress import Silent, View, open_view
from gradsync.observe.terminal import fit_for, lasting
from gradsync.train.config import TrainConfig
from gradsync.train.interrupt import STOP_WORD, StopReason, StopRequests, listening
from gradsync.train.job import Job, Place
from gradsync.train.ranks import Alone, Group, Ranks
from gradsync.train.runfolder import new_run_path
from gradsync.train.trainer import Outcome

GiveUp = Callable[[Exception], NoReturn]

_PROGRAM = "gradsync train"
_EXIT_CODES = {
    StopReason.NONE: 0,
    StopReason.INTERRUPT: EXIT_INTERRUPTED,
    StopReason.TERMINATE: EXIT_TERMINATED,
}
# torchrun hands on the Ctrl-C that the terminal has sent to every process already.
_TORCHRUN_REPEAT_S = 1.0
_AFTERMATH_S = 1.0


def run_alone(config: TrainConfig) -> int:
    """Train in this process alone, without a process group."""
    requests = StopRequests()
    try:
        with listening(requests):
            outcome = _train(config, Alone(), requests)
    except GradsyncError:
        raise
    except Exception as error:  # noqa: BLE001 - shown as one line, kept whole in the run folder
        failure = failure_of(0, error)
        keep_trace(config, failure)
        return fail(_PROGRAM, describe(failure, config), failure.exit_code)
    return exit_code(outcome)


def join(config: TrainConfig) -> int:
    """Train as one of the ranks that torchrun, srun or mpiexec has started."""
    requests = StopRequests()
    rank = int(os.environ["RANK"])

    def give_up(error: Exception) -> NoReturn:
        failure = failure_of(rank, error)
        keep_trace(config, failure)
        is_probably_of_all = failure.is_expected and not isinstance(error, RankFailedError | StalledError)
        # What all ranks refuse together is said once; but rank 0 may be just the one that is lost.
        if rank != 0 and failure.is_expected:
            if is_probably_of_all:
                part()
            let_speak(failure.exit_code)
        if rank == 0 or failure.exit_code != EXIT_USAGE:
            fail(_PROGRAM, describe(failure, config), failure.exit_code)
        if rank == 0 and is_probably_of_all:
            part()
        end_now(failure.exit_code)

    try:
        with listening(requests, _TORCHRUN_REPEAT_S):
            outcome = _train_in_group(config, requests, give_up)
    except Exception as error:  # noqa: BLE001
        if isinstance(error, ConfigError) and not dist.is_initialized():
            raise
        if rank != 0:
            leave_with(failure_of(rank, error).exit_code)
        _tell_the_others(error)
        give_up(error)
    return exit_code(outcome)


def run_local_rank(config: TrainConfig, control: Path) -> Outcome:
    """Train as one of the ranks that our launcher has started; its word to stop is a file in ``control``."""
    requests = StopRequests(control / STOP_WORD)
    rank = int(os.environ["RANK"])

    def give_up(error: Exception) -> NoReturn:
        failure = failure_of(rank, error)
        if failure.is_aftermath:
            time.sleep(_AFTERMATH_S)  # let the launcher notice the rank first that was lost
        record(control, failure)
        end_now(failure.exit_code)

    # The terminal's Ctrl-C and hang-up reach every process; what is to be done is the launcher's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening(requests):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGTERM})
            return _train_in_group(config, requests, give_up)
    except Exception as error:  # noqa: BLE001
        _tell_the_others(error)
        give_up(error)


def _tell_the_others(error: Exception) -> None:
    watch = watch_of_world()
    if watch is not None:
        watch.when_stuck = None  # what the others tell meanwhile is not what this rank fails of
    tell(error)


def exit_code(outcome: Outcome) -> int:
    """Return the exit code for the way a run ended."""
    return _EXIT_CODES[outcome.reason]


def _train_in_group(config: TrainConfig, requests: StopRequests, give_up: GiveUp) -> Outcome:
    from gradsync.comm.process import destroy_process_group, init_process_group

    device = _device(config)
    view = _open_view(config) if int(os.environ["RANK"]) == 0 else Silent()
    with _logging_to(view):
        init_process_group(config.backend, device_type=device.type, soft_limit_s=config.soft_limit)
    watch = watch_of_world()
    if watch is not None:
        watch.when_stuck = give_up
    ranks = Group()
    # Rank 0's options: whether there is something to resume looks different on a host that comes a moment later.
    config = ranks.from_first(replace(config, run=config.run or new_run_path(config.preset)))
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
    lines = []
    if not outcome.is_finished:
        lines.append(f"stopped after step {outcome.step} of {outcome.total_steps}; go on with:")
        lines.append(f"  gradsync train --run {outcome.run} --resume")
    else:
        loss = "" if outcome.val_loss is None else f", validation loss {outcome.val_loss:.4f} nats per token"
        lines.append(f"finished step {outcome.step} of {outcome.total_steps}{loss}")
        if outcome.sample is not None:
            lines.append(f"--- sample ---\n{outcome.sample}\n--------------")
        lines.append(f'more samples: gradsync sample {outcome.run} --prompt "..."')
    print(fit_for(sys.stdout, "\n".join(lines)), file=lasting(sys.stdout), flush=True)


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
        torch.set_num_threads(max(1, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def _open_view(config: TrainConfig) -> View:
    return open_view(config.progress, lasting(sys.stderr), config.log_every)


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
