"""Where step records are kept: a file of JSON lines, TensorBoard events, or nowhere.

Receives plain numbers; knows nothing of training. ``open_sinks`` says which of them a run gets.
"""

import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from gradsync.errors import MissingExtraError
from gradsync.observe.records import StepRecord


class Sink(Protocol):
    """Something that keeps step records."""

    def write(self, record: StepRecord) -> None:
        """Keep one record."""

    def close(self) -> None:
        """Write out what is still held."""


class JsonLines:
    """Appends one JSON object a step, each line written out at once so that a kill loses nothing.

    Numbers that JSON has no spelling for (a loss that is not finite) are written as null. A line that
    could be written in part only (a full disk) spoils no other one.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._is_amid_line = False

    def write(self, record: StepRecord) -> None:
        """Append the record."""
        line = json.dumps(_finite(record.as_json()), allow_nan=False) + "\n"
        left = memoryview((("\n" if self._is_amid_line else "") + line).encode())
        while left:
            written = self._file.write(left)
            assert written is not None  # it blocks
            left = left[written:]
            self._is_amid_line = bool(left)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Writes the records as TensorBoard scalars; the import is paid at the first record."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._is_broken = False

    def write(self, record: StepRecord) -> None:
        """Write every number of the record."""
        if self._is_broken:
            return
        if self._writer is None:
            self._writer = self._open()
        numbers = record.as_json()
        step = numbers.pop("step")
        for name, value in numbers.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def _open(self) -> Any:
        self._is_broken = True
        try:
            from torch.utils.tensorboard import SummaryWriter
        except Exception as error:  # an installation at odds with itself raises almost anything
            raise MissingExtraError(f"tensorboard is installed but cannot be used: {error}") from error
        self._is_broken = False
        return SummaryWriter(str(self._folder))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Flush the events."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Logs the records to a project in Weights & Biases."""

    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError(
                "--wandb needs the wandb package; install it with: pip install 'gradsync[wandb]'"
            ) from error
        # The folder's name identifies the run, so that a resumed one goes on in the same curve.
        self._run = wandb.init(project=project, dir=folder, id=folder.resolve().name, resume="allow", config=config)

    def write(self, record: StepRecord) -> None:
        """Log every number of the record."""
        numbers = record.as_json()
        self._run.log(numbers, step=numbers.pop("step"))

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class Forgiving:
    """A sink whose failures end nothing: they are told when they begin, and what is missing when they end."""

    def __init__(self, sink: Sink, tell: Callable[[str], None]) -> None:
        self._sink = sink
        self._tell = tell
        self._first_missing: int | None = None

    def write(self, record: StepRecord) -> None:
        """Keep the record if that is possible."""
        try:
            self._sink.write(record)
        except (OSError, MissingExtraError) as error:
            if self._first_missing is None:
                self._tell(f"warning: metrics cannot be written, they are missing from step {record.step} on: {error}")
                self._first_missing = record.step
            return
        if self._first_missing is not None:
            self._tell(
                f"metrics of steps {self._first_missing} to {record.step - 1} are missing, later ones are written"
            )
            self._first_missing = None

    def close(self) -> None:
        """Write out what is still held if that is possible."""
        try:
            self._sink.close()
        except OSError as error:
            self._tell(f"warning: the last metrics could not be written: {error}")


def has_tensorboard() -> bool:
    """Whether TensorBoard is installed."""
    return importlib.util.find_spec("tensorboard") is not None


def open_sinks(folder: Path, tensorboard: bool, wandb: str | None, config: dict[str, Any]) -> list[Sink]:
    """Return the sinks of a run folder: JSON lines always, the others where wanted and installed.

    Raises:
        MissingExtraError: Weights & Biases is wanted and not installed.
    """
    sinks: list[Sink] = []
    if tensorboard and has_tensorboard():
        sinks.append(TensorBoard(folder / "tensorboard"))
    if wandb is not None:
        sinks.append(WandB(wandb, folder, config))
    # The file comes last: what is opened here needs to be closed, and the others may fail.
    return [JsonLines(folder / "metrics.jsonl"), *sinks]


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a metrics file; lines cut short by a kill or a full disk are left out."""
    for record in read_objects(path):
        if isinstance(record.get("step"), int):
            yield record


def losses_of(records: Iterable[dict[str, Any]]) -> Iterator[float]:
    """Yield the losses of the steps that were not skipped."""
    for record in records:
        loss = record.get("loss")
        if isinstance(loss, int | float) and not record.get("skipped"):
            yield loss


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines, and leave out what is none.

    Numbers that are infinite or not a number, which JSON does not know, become None.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            try:
                found = json.loads(line, parse_constant=_no_number)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found


def _no_number(spelling: str) -> None:
    return None


def forget_after(path: Path, step: int) -> None:
    """Drop the records of steps after ``step``: a resumed run takes those steps again."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    if not path.exists():
        return
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(unfinished, path)


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
