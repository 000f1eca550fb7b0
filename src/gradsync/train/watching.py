"""What a run tells of its ranks while it goes on: who is late, and on demand a trace of a few steps.

Where the engine wraps the whole model, it looks at the engine's timeline; in other layouts at the loop's own phases,
and at what of the engine and the pipeline's stages there is inside. Every rank does the same; with one there is nothing
to tell.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from gradsync.ddp.module import DistributedDataParallel
from gradsync.ddp.recording import record_all
from gradsync.ddp.report import Straggler, milliseconds
from gradsync.observe.page import TIMELINE_FILE
from gradsync.observe.trace import render_trace
from gradsync.parallel.replica import Replica
from gradsync.train.config import TrainConfig
from gradsync.train.phases import Phases, Step
from gradsync.train.profiling import TRACE_FILE
from gradsync.train.ranks import Ranks
from gradsync.train.tracing import late_rank, record_steps, steps_of_all

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


class _Sight(Protocol):
    """What is looked at."""

    def record(self, num_steps: int) -> None:
        """Begin to record so many steps, the next ones."""

    def recording(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Return what was recorded of these steps; collective."""

    def late(self, steps: Sequence[Step]) -> Straggler | None:
        """Return who is late in the last steps, as these tell it; all ranks together."""


class _EngineSight:
    """The engine that wraps the whole model."""

    def __init__(self, ranks: Ranks, ddp: DistributedDataParallel) -> None:
        self._ranks = ranks
        self._ddp = ddp

    def record(self, num_steps: int) -> None:
        self._ddp.reducer.timeline.record(num_steps)

    def recording(self, steps: Sequence[Step]) -> dict[str, Any]:
        recording = record_all(self._ddp.reducer)
        for rank, own in zip(recording["ranks"], steps_of_all(self._ranks, steps), strict=True):
            rank["steps"] = own
        return recording

    def late(self, steps: Sequence[Step]) -> Straggler | None:
        return self._ddp.report().straggler


class _LoopSight:
    """The training loop, with whatever is inside."""

    def __init__(self, ranks: Ranks, replica: Replica) -> None:
        self._ranks = ranks
        self._replica = replica

    def record(self, num_steps: int) -> None:
        for wrapper in self._replica.engines:
            wrapper.reducer.timeline.record(num_steps)

    def recording(self, steps: Sequence[Step]) -> dict[str, Any]:
        return record_steps(self._ranks, self._replica, steps)

    def late(self, steps: Sequence[Step]) -> Straggler | None:
        return late_rank(self._ranks, steps) if steps else None


class RankWatch:
    """Looks at the steps of all ranks; ``note`` says something to the user."""

    def __init__(
        self, sight: _Sight, rank: int, phases: Phases, config: TrainConfig, folder: Path, note: Callable[[str], None]
    ) -> None:
        self._sight = sight
        self._rank = rank
        self._phases = phases
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
        late = self._sight.late(self._steady()[-self._every :])
        self._tell(number, late)
        return None if late is None else asdict(late)

    def finish(self) -> None:
        """Write the trace of a start that was too short for all of it."""
        if self._is_tracing:
            self._write_trace()

    def _steady(self) -> list[Step]:
        return list(self._phases.steps)[_WARM_UP_STEPS:]

    def _trace(self) -> None:
        if self._num_trace_steps and self._num_steps == _WARM_UP_STEPS:
            self._sight.record(self._num_trace_steps)
            self._is_tracing = True
        # the last one has ended when the one after it is told of
        if self._is_tracing and self._num_steps > _WARM_UP_STEPS + self._num_trace_steps:
            self._write_trace()

    def _write_trace(self) -> None:
        self._is_tracing = False
        steps = self._steady()[: self._num_trace_steps]
        if not steps:
            return
        recording = self._sight.recording(steps)
        if self._rank != 0:
            return
        trace = self._folder / TRACE_FILE
        try:
            trace.write_text(render_trace(recording), encoding="utf-8")
            (self._folder / TIMELINE_FILE).write_text(json.dumps(recording, allow_nan=False), encoding="utf-8")
        except OSError as error:
            self._note(f"warning: the trace could not be written: {error}")
            return
        self._note(f"traced {len(steps)} steps: {recording['verdict']}; {trace}")

    def _tell(self, number: int, late: Straggler | None) -> None:
        """Say who is late when that has changed."""
        now = None if late is None else (late.rank, late.phase)
        if late is not None and now != self._told:
            self._note(
                f"step {number}: rank {late.rank} is late by {milliseconds(late.delay_s)} a step, in {late.phase}"
            )
        self._told = now


def watch_of(
    ranks: Ranks, replica: Replica, phases: Phases, config: TrainConfig, folder: Path, note: Callable[[str], None]
) -> Watch:
    """Return the watch of a run."""
    if ranks.world == 1:
        if config.trace:
            note("--trace: nothing is traced, since there is one process and nothing that it waits for; take --nproc 2")
        return NoWatch()
    sight = _LoopSight(ranks, replica) if replica.ddp is None else _EngineSight(ranks, replica.ddp)
    return RankWatch(sight, ranks.rank, phases, config, folder, note)
