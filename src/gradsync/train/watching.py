"""What a run tells of its ranks while it goes on: who is late, and on demand a trace of a few steps.

Works on the wrapped model's timeline, on every rank alike; with one rank there is nothing to tell.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from gradsync.ddp.module import DistributedDataParallel
from gradsync.ddp.recording import record_all
from gradsync.ddp.report import Straggler, milliseconds
from gradsync.observe.page import TIMELINE_FILE
from gradsync.observe.trace import render_trace
from gradsync.train.config import TrainConfig
from gradsync.train.profiling import TRACE_FILE

_WARM_UP_STEPS = 2
"""The first steps of a start are not like the others."""


class Watch(Protocol):
    """Told of every finished step, on all ranks together."""

    def step(self, number: int) -> dict[str, Any] | None:
        """Return who is late, every so often; ``number`` is the step's."""

    def finish(self) -> None:
        """Write what is still held, at the end of a start that went well."""


class NoWatch:
    """For a lone process."""

    def step(self, number: int) -> dict[str, Any] | None:
        """Return None."""
        return None

    def finish(self) -> None:
        """Do nothing."""


class RankWatch:
    """Looks at the timeline of a wrapped model; ``note`` says something to the user."""

    def __init__(
        self, ddp: DistributedDataParallel, config: TrainConfig, folder: Path, note: Callable[[str], None]
    ) -> None:
        self._ddp = ddp
        self._every = config.straggler_every
        self._folder = folder
        self._note = note
        self._num_trace_steps = config.trace_steps if config.trace else 0
        self._num_steps = 0
        self._is_tracing = False
        self._told: tuple[int, str] | None = None

    def step(self, number: int) -> dict[str, Any] | None:
        """Begin or end the trace if it is time for that; return who is late, every so often."""
        self._num_steps += 1
        self._trace()
        if not self._every or number % self._every:
            return None
        late = self._ddp.report().straggler
        self._tell(number, late)
        return None if late is None else asdict(late)

    def finish(self) -> None:
        """Write the trace of a start that was too short for all of it."""
        if self._is_tracing:
            self._write_trace()

    def _trace(self) -> None:
        if self._num_trace_steps and self._num_steps == _WARM_UP_STEPS:
            self._ddp.reducer.timeline.record(self._num_trace_steps)
            self._is_tracing = True
        if self._is_tracing and self._num_steps == _WARM_UP_STEPS + self._num_trace_steps:
            self._write_trace()

    def _write_trace(self) -> None:
        self._is_tracing = False
        recording = record_all(self._ddp.reducer)
        if self._ddp.reducer.rank != 0:
            return
        trace = self._folder / TRACE_FILE
        try:
            trace.write_text(render_trace(recording), encoding="utf-8")
            (self._folder / TIMELINE_FILE).write_text(json.dumps(recording, allow_nan=False), encoding="utf-8")
        except OSError as error:
            self._note(f"warning: the trace could not be written: {error}")
            return
        num_steps = len(recording["ranks"][0]["passes"])
        self._note(f"traced {num_steps} steps: {recording['verdict']}; {trace}")

    def _tell(self, number: int, late: Straggler | None) -> None:
        """Say who is late when that has changed."""
        now = None if late is None else (late.rank, late.phase)
        if late is not None and now != self._told:
            self._note(
                f"step {number}: rank {late.rank} is late by {milliseconds(late.delay_s)} a step, in {late.phase}"
            )
        self._told = now


def watch_of(
    ddp: DistributedDataParallel | None, config: TrainConfig, folder: Path, note: Callable[[str], None]
) -> Watch:
    """Return the watch of a run's wrapped model, if it is wrapped."""
    if ddp is not None and ddp.reducer.world_size > 1:
        return RankWatch(ddp, config, folder, note)
    if config.trace:
        note("--trace: nothing is traced, since that takes several whole replicas (ddp or zero, without --tp and --pp)")
    return NoWatch()
