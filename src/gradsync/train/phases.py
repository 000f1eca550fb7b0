"""What the training loop is doing: the phases of a step, one after the other, the same in every layout.

The loop says it once; whoever wants to know reads it here or, on other ranks, from the watch. A step's window goes from
its wait for data to the next one's, so with the validation, the checkpoint and the sample after it. Times are the
host's: what a GPU does is in the phase in which the host waits for it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from gradsync.comm.watches import note_loop

PHASES = (
    "data",
    "forward and backward",
    "gradient norm",
    "optimizer",
    "evaluation",
    "checkpoint",
    "sample",
    "between steps",
)
DATA, COMPUTE, NORM, OPTIMIZER, EVALUATION, CHECKPOINT, SAMPLE, BETWEEN = PHASES

_KEPT_STEPS = 1000


@dataclass(frozen=True)
class Step:
    """One step of this rank: its phases in order, each with its begin and end (``time.perf_counter_ns``)."""

    number: int
    spans: tuple[tuple[str, int, int], ...]

    @property
    def began_ns(self) -> int:
        """When it began."""
        return self.spans[0][1]

    @property
    def ended_ns(self) -> int:
        """When the next one began."""
        return self.spans[-1][2]

    def total_s(self, *phases: str) -> float:
        """Return the seconds spent in some phases."""
        return sum(end - begin for phase, begin, end in self.spans if phase in phases) * 1e-9

    def as_json(self) -> dict[str, Any]:
        """Return it as a pass of a recording (see ``observe.trace``) that has no buckets."""

        def seconds(moment: int) -> float:
            return (moment - self.began_ns) * 1e-9

        return {
            "number": self.number,
            "began_s": self.began_ns * 1e-9,
            "duration_s": seconds(self.ended_ns),
            "spans": [
                {"phase": phase, "start_s": seconds(begin), "end_s": seconds(end)} for phase, begin, end in self.spans
            ],
            "buckets": [],
        }


class Phases:
    """Where this rank's loop is, and where it was in the last steps."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=_KEPT_STEPS)
        """The steps that have ended."""
        self._number = 0
        self._phase = ""
        self._began_ns = 0
        self._spans: list[tuple[str, int, int]] = []

    def begin(self, phase: str, step: int) -> None:
        """A phase begins, and with it the one before has ended; ``step`` counts from 1."""
        now = perf_counter_ns()
        self._close(now)
        if phase == DATA:
            self._end_step()
        self._number, self._phase, self._began_ns = step, phase, now
        note_loop(f"step {step}, {phase}")

    def end(self) -> None:
        """The loop is over."""
        self._close(perf_counter_ns())
        self._end_step()
        note_loop("")

    def last(self, count: int) -> Sequence[Step]:
        """Return the last steps that have ended, at most so many."""
        return list(self.steps)[-count:] if count else []

    def _close(self, now: int) -> None:
        if self._phase:
            self._spans.append((self._phase, self._began_ns, now))
            self._phase = ""

    def _end_step(self) -> None:
        if self._spans:
            self.steps.append(Step(self._number, tuple(self._spans)))
            self._spans = []
