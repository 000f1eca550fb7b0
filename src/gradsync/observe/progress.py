"""How a run is shown while it goes on: live on a terminal, plain lines elsewhere, or not at all.

Receives step records; knows nothing of training. The clock and the stream are arguments. Everything
goes to the stream given (standard error, in the commands); results are not progress.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any, Literal, Protocol

from gradsync.observe.records import StepRecord
from gradsync.observe.terminal import harmless

Clock = Callable[[], float]
Mode = Literal["auto", "live", "plain", "none"]

_SMOOTHING = 0.9
_REFRESH_S = 0.2


@dataclass(frozen=True)
class Course:
    """What lies before a start of a run, which has ``step`` of its steps behind it already."""

    step: int
    total_steps: int
    tokens_per_step: int
    smoothed_loss: float | None = None
    """Of the steps taken before."""


class View(Protocol):
    """What a training run tells while it goes on."""

    def begin(self, course: Course) -> None:
        """Start showing a run."""

    def step(self, record: StepRecord, memory_bytes: int) -> None:
        """Show a finished step."""

    def note(self, message: str) -> None:
        """Say something that is not a step."""

    def close(self) -> None:
        """Leave the terminal as it was."""


_NOWHERE = Course(0, 0, 0)


class Silent:
    """Shows nothing: the view of every rank but the first, and of ``--progress none``."""

    def begin(self, course: Course) -> None:
        """Show nothing."""

    def step(self, record: StepRecord, memory_bytes: int) -> None:
        """Show nothing."""

    def note(self, message: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Do nothing."""


class Pace:
    """Smoothed loss, smoothed speed, and the time left at that speed, from the records and a clock."""

    def __init__(self, course: Course, clock: Clock) -> None:
        self.total_steps = course.total_steps
        self.smoothed_loss = course.smoothed_loss
        self._tokens_per_step = course.tokens_per_step
        self._clock = clock
        self._last_s = clock()
        self._step_s: float | None = None
        self._pauses_s = 0.0
        self._num_updates = 0
        self._step = course.step

    def update(self, record: StepRecord) -> None:
        """Take in a finished step, and what came between it and the one before."""
        now = self._clock()
        step_s = self._tokens_per_step / record.tokens_per_s
        self._pauses_s += max(now - self._last_s - step_s, 0.0)
        # The first step warms up (and may compile), so it says nothing about those to come.
        self._step_s = step_s if self._num_updates < 2 else _blend(self._step_s, step_s)
        self._num_updates += 1
        self._last_s, self._step = now, record.step
        if not record.skipped:
            self.smoothed_loss = _blend(self.smoothed_loss, record.loss)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the latest steps by the time that they took."""
        return self._tokens_per_step / self._step_s if self._step_s else 0.0

    @property
    def left_s(self) -> float:
        """Seconds to the end: the steps at the present speed, with as much between them as there was until now.

        Evaluations and checkpoints are rare and long: counted as part of the latest steps they would make the
        time left leap with each one.
        """
        if self._step_s is None:
            return 0.0
        return (self._step_s + self._pauses_s / self._num_updates) * (self.total_steps - self._step)


class Plain:
    """One line every few steps, and for the first, the last and every validated one."""

    def __init__(self, stream: IO[str], every: int, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._every = every
        self._clock = clock
        self._pace = Pace(_NOWHERE, clock)
        self._is_first = True

    def begin(self, course: Course) -> None:
        """Start counting."""
        self._pace = Pace(course, self._clock)
        self._is_first = True

    def step(self, record: StepRecord, memory_bytes: int) -> None:
        """Print a line if it is time for one."""
        self._pace.update(record)
        is_last = record.step == self._pace.total_steps
        if self._is_first or is_last or record.step % self._every == 0 or record.val_loss is not None:
            self.note("  ".join(describe(record, self._pace, memory_bytes)))
        self._is_first = False

    def note(self, message: str) -> None:
        """Print the message."""
        print(harmless(message), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is held."""


class Live:
    """One line that is drawn anew, with a bar; notes scroll by above it.

    It is drawn from ``step`` at most five times a second and not by a thread of its own, which would
    take its time from the training on the same core.
    """

    def __init__(self, stream: IO[str], clock: Clock = time.monotonic) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._clock = clock
        self._console = Console(file=stream, highlight=False)
        self._progress = Progress(
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            console=self._console,
            auto_refresh=False,
            get_time=clock,
            transient=False,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._pace = Pace(_NOWHERE, clock)
        self._drawn_s = float("-inf")

    def begin(self, course: Course) -> None:
        """Draw the bar."""
        self._pace = Pace(course, self._clock)
        self._progress.update(self._task, total=course.total_steps, completed=course.step)
        self._progress.start()

    def step(self, record: StepRecord, memory_bytes: int) -> None:
        """Draw the step if the last drawing is long enough ago."""
        self._pace.update(record)
        text = "  ".join(describe(record, self._pace, memory_bytes))
        self._progress.update(self._task, completed=record.step, description=text)
        is_last = record.step == self._pace.total_steps
        if is_last or self._clock() - self._drawn_s >= _REFRESH_S:
            self._drawn_s = self._clock()
            self._progress.refresh()
        if record.val_loss is not None:
            self.note(f"step {record.step}: validation loss {record.val_loss:.4f}")

    def note(self, message: str) -> None:
        """Print above the bar."""
        self._console.print(harmless(message), markup=False)

    def close(self) -> None:
        """Stop drawing and give the cursor back."""
        self._progress.stop()


def open_view(mode: Mode, stream: IO[str], every: int, environ: Any = os.environ) -> View:
    """Return the view for a stream: live on a capable terminal, else plain, unless one is asked for."""
    if mode == "auto":
        capable = stream.isatty() and environ.get("TERM", "") not in ("dumb", "")
        mode = "live" if capable or (stream.isatty() and sys.platform == "win32") else "plain"
    if mode == "live":
        return Live(stream)
    return Plain(stream, every) if mode == "plain" else Silent()


def describe(record: StepRecord, pace: Pace, memory_bytes: int) -> list[str]:
    """Return the parts of a progress line."""
    width = len(str(pace.total_steps))
    parts = [f"step {record.step:>{width}}/{pace.total_steps}", f"loss {record.loss:.4f}"]
    if pace.smoothed_loss is not None:
        parts.append(f"smoothed {pace.smoothed_loss:.4f}")
    if record.val_loss is not None:
        parts.append(f"val {record.val_loss:.4f}")
    if record.skipped:
        parts.append("skipped")
    parts += [
        f"lr {record.lr:.2e}",
        f"norm {record.grad_norm:.2f}",
        f"{pace.tokens_per_s:,.0f} tokens/s",
        *([] if record.mfu is None else [f"mfu {record.mfu * pace.tokens_per_s / record.tokens_per_s:.0%}"]),
        f"{format_duration(pace.left_s)} left",
        f"{memory_bytes / 2**20:,.0f} MiB",
    ]
    return parts


def format_duration(seconds: float) -> str:
    """Return a duration as people say it: 42s, 3m05s, 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def smoothed(losses: Iterable[float]) -> float | None:
    """Return what the smoothed loss is after these."""
    found: float | None = None
    for loss in losses:
        found = _blend(found, loss)
    return found


def _blend(old: float | None, new: float) -> float:
    return new if old is None else _SMOOTHING * old + (1.0 - _SMOOTHING) * new
