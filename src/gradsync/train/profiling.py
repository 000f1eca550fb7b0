"""Recording a few steps of any training loop, exactly and on all ranks: what ``gradsync.profile`` is.

Puts the engine's recording and the pages together; the loop stays the user's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradsync.ddp.module import DistributedDataParallel
from gradsync.ddp.recording import record_all, report_of
from gradsync.ddp.report import Report
from gradsync.errors import ConfigError
from gradsync.observe.page import render_recording
from gradsync.observe.trace import render_trace

TRACE_FILE = "trace.json"
PAGE_FILE = "timeline.html"


class Profile:
    """What was recorded; complete once the ``with`` block is left."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self.recording: dict[str, Any] | None = None
        """The steps of all ranks as plain JSON; None while they are recorded."""

    @property
    def num_recorded(self) -> int:
        """How many steps have been recorded so far."""
        return len(self._ddp.reducer.timeline.recorded)

    @property
    def report(self) -> Report:
        """The recorded steps of this rank."""
        return report_of(self._ddp.reducer, self._ddp.reducer.timeline.recorded)

    @property
    def verdict(self) -> str:
        """One sentence about them."""
        return self.report.verdict

    def save_trace(self, path: str | Path) -> None:
        """Write a trace for chrome://tracing or ui.perfetto.dev: one lane a rank."""
        _write(Path(path), render_trace(self._complete()))

    def save_page(self, path: str | Path) -> None:
        """Write a page with the steps, the buckets and the verdict; it works offline."""
        _write(Path(path), render_recording(self._complete(), type(self._ddp.module).__name__))

    def _complete(self) -> dict[str, Any]:
        if self.recording is None:
            raise ConfigError("a profile is complete once its 'with' block is left; save it after that")
        return self.recording

    def _gather(self) -> None:
        self.recording = record_all(self._ddp.reducer)


@contextmanager
def profile(ddp: DistributedDataParallel, steps: int = 10, out: str | Path | None = None) -> Iterator[Profile]:
    """Record the next ``steps`` synchronised steps of a loop on all ranks.

    Args:
        ddp: the wrapped model; all ranks enter and leave the block together.
        steps: how many steps are recorded; more may run.
        out: a folder in which rank 0 writes ``trace.json`` and ``timeline.html`` at the end.

    Raises:
        ConfigError: ``ddp`` is not gradsync's, or ``steps`` is no positive number.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(f"profile takes a gradsync.DistributedDataParallel, but got a {type(ddp).__name__}")
    if steps < 1:
        raise ConfigError(f"profile records at least one step, but got steps={steps}")
    timeline, found = ddp.reducer.timeline, Profile(ddp)
    timeline.record(steps)
    try:
        yield found
    finally:
        timeline.record(0)
    found._gather()
    if out is not None and ddp.reducer.rank == 0:
        found.save_trace(Path(out) / TRACE_FILE)
        found.save_page(Path(out) / PAGE_FILE)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
