"""The exceptions that gradsync raises for its user.

Every message says what happened, what was seen, what was expected and what to do about it, and
names the rank where ranks matter. Nothing here imports torch.
"""

import sysconfig
import traceback
from pathlib import Path


class GradsyncError(Exception):
    """Base of everything that gradsync raises on purpose."""


class ConfigError(GradsyncError, ValueError):
    """An option or argument cannot work, or names a path that does not exist; the command line exits with code 2."""


class DataError(GradsyncError):
    """A data file is missing, empty, damaged, foreign or too short."""


class CheckpointError(GradsyncError):
    """A checkpoint or run folder is missing, damaged, or belongs to another configuration."""


class ContractError(GradsyncError, RuntimeError):
    """The ranks do not hold the same model, so their gradients cannot be averaged."""


class ReducerFailedError(GradsyncError, RuntimeError):
    """A pass could not be completed; the engine runs no further collective until it is reset."""


class ShardedGradientError(GradsyncError, RuntimeError):
    """The values of a gradient are asked for that no rank holds whole, since the optimizer is sharded."""


class BackendError(GradsyncError, RuntimeError):
    """A process group could not be started, or was lost while it was used."""


class RankFailedError(GradsyncError, RuntimeError):
    """Another rank has failed, or is gone; the message holds that rank's own error."""


class StalledError(GradsyncError, RuntimeError):
    """This rank has waited longer than the soft limit; the message says where every rank is."""


class MissingExtraError(GradsyncError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class UserCodeError(GradsyncError):
    """A function of the user's has raised; the message has its exception, and the last line of the user's that ran."""


class NonFiniteError(GradsyncError, ArithmeticError):
    """A step's loss or gradient is infinite or not a number on some rank, and the run is to stop then."""


def in_users_words(error: BaseException) -> str:
    """Return an exception in one line: type, text, and the last line that ran and is neither a library's nor ours."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    if not own:
        return text
    return f"{text} ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}: {own[-1].line})"


def _is_library(filename: str) -> bool:
    folders = (str(Path(__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))
    return filename.startswith((*folders, "<")) or "site-packages" in Path(filename).parts
