"""What became of a rank that failed: recorded by the rank, told once by whoever answers to the user.

Imports no torch: the launcher reads these before and after it has anything to do with it.
"""

import json
import signal
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from gradsync import errors
from gradsync.cli.main import EXIT_FAILED, exit_code_of
from gradsync.comm.aftermath import is_aftermath
from gradsync.comm.remarks import told
from gradsync.errors import BackendError, GradsyncError, StalledError
from gradsync.train.config import TrainConfig
from gradsync.train.runfolder import RunFolder


@dataclass(frozen=True)
class Failure:
    """One rank's failure; *expected* ones explain themselves, an *aftermath* only tells that another rank is lost."""

    rank: int
    kind: str
    message: str
    trace: str
    exit_code: int
    is_expected: bool
    is_aftermath: bool


def failure_of(rank: int, error: Exception) -> Failure:
    """Return the record of an exception."""
    is_expected = isinstance(error, GradsyncError)
    return Failure(
        rank=rank,
        kind=type(error).__name__,
        message=told(error),
        trace="".join(traceback.format_exception(error)),
        exit_code=exit_code_of(error) if isinstance(error, GradsyncError) else EXIT_FAILED,
        is_expected=is_expected,
        # what ended the wait is one, but the error that came of it says who is missing
        is_aftermath=is_aftermath(error) and not isinstance(error, StalledError),
    )


def raised_again(failure: Failure) -> GradsyncError:
    """Return a rank's failure as an exception of this process, of the same class if it was one of ours."""
    kind = getattr(errors, failure.kind, None)
    if failure.is_expected and isinstance(kind, type) and issubclass(kind, GradsyncError):
        return kind(failure.message)
    if failure.is_expected:
        return BackendError(failure.message)
    return GradsyncError(f"rank {failure.rank}: {failure.kind}: {failure.message}")


def silent_failure(rank: int, code: int) -> Failure:
    """Return the record of a rank that ended without leaving one."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (often: out of memory)" if -code == signal.SIGKILL else ""
        message = f"rank {rank} was killed by {name}{hint}"
    else:
        message = f"rank {rank} ended with exit code {code} and without a word"
    return Failure(rank, "", message, "", EXIT_FAILED, is_expected=True, is_aftermath=False)


def record(folder: Path, failure: Failure) -> None:
    """Leave a failure where the launcher looks for it."""
    (folder / f"rank-{failure.rank}.json").write_text(json.dumps(asdict(failure)), encoding="utf-8")


def recorded(folder: Path) -> list[Failure]:
    """Return the failures left in a folder, causes before aftermaths."""
    entries = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank-*.json"))]
    return sorted((Failure(**entry) for entry in entries), key=lambda failure: (failure.is_aftermath, failure.rank))


def cause(failures: list[Failure], first_rank: int, first_code: int) -> Failure:
    """Return the failure behind the others, given which rank was seen to end first and how."""
    own = [failure for failure in failures if failure.rank == first_rank]
    for failure in (*own, *failures):
        if not failure.is_aftermath:
            return failure
    return own[0] if own else silent_failure(first_rank, first_code)


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
