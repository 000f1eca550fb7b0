"""Times the contestants in alternating rounds on the ranks of a started process group.

Alternating, since a machine's speed drifts: what is compared was measured within the same second. A sample
is the time of a few steps between two barriers, as rank 0 sees it.
"""

import gc
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradsync.bench.variants import Step, Variant, make_training
from gradsync.bench.workloads import Workload

_WARMUP_STEPS = 3
_MEMORY_STEPS = 3
_SAMPLING_S = 0.02


@dataclass(frozen=True)
class Contestant:
    """A variant on a backend; ``bare`` and ``threads`` have none."""

    variant: Variant
    backend: str | None = None

    @property
    def name(self) -> str:
        """The name shown in tables, such as ``gradsync/gloo``."""
        return self.variant.value if self.backend is None else f"{self.variant.value}/{self.backend}"


@dataclass
class Timing:
    """Samples of one contestant: seconds a step, one a round."""

    contestant: Contestant
    step_s: list[float] = field(default_factory=list)
    exposed_s: float | None = None
    """Seconds a step in which this rank did nothing but wait for communication; None if that is not known."""
    peak_bytes: int | None = None
    """The most memory that this rank held while it trained; None if that was not measured."""

    @property
    def median_s(self) -> float:
        """Median time of a step in seconds."""
        return statistics.median(self.step_s)


def time_contestants(
    contestants: Sequence[Contestant], workload: Workload, num_rounds: int, measures_memory: bool = False
) -> list[Timing]:
    """Run ``num_rounds`` rounds of all contestants; every rank calls it, rank 0's times count.

    The memory is that of the whole process: it means something if there is one contestant.
    """
    rank = dist.get_rank()
    groups = {b: dist.new_group(backend=b) for b in dict.fromkeys(c.backend for c in contestants) if b is not None}
    trainings = [make_training(c.variant, workload, _group_for(c, groups), rank) for c in contestants]
    steps = [training.step for training in trainings]
    timings = [Timing(c) for c in contestants]
    for contestant, step in zip(contestants, steps, strict=True):
        if _takes_part(contestant, rank):
            _run(step, _WARMUP_STEPS)
    gc.collect()
    gc.freeze()  # what the contestants have set up is not looked at again while the clock runs
    for _ in range(num_rounds):
        for timing, step in zip(timings, steps, strict=True):
            dist.barrier()
            if not _takes_part(timing.contestant, rank):
                continue
            start_s = time.perf_counter()
            _run(step, workload.steps_per_sample)
            timing.step_s.append((time.perf_counter() - start_s) / workload.steps_per_sample)
    dist.barrier()
    gc.unfreeze()
    for timing, training in zip(timings, trainings, strict=True):
        if measures_memory:
            timing.peak_bytes = _peak_bytes(training.step, _takes_part(timing.contestant, rank))
        if _takes_part(timing.contestant, rank):
            timing.exposed_s = training.exposed_s()
    return timings


def _peak_bytes(step: Step, takes_part: bool) -> int:
    with PeakMemory() as memory:
        if takes_part:
            _run(step, _MEMORY_STEPS)
        dist.barrier()
    return memory.peak_bytes


def _group_for(contestant: Contestant, groups: dict[str, Any]) -> Any:
    return dist.group.WORLD if contestant.backend is None else groups[contestant.backend]


def _takes_part(contestant: Contestant, rank: int) -> bool:
    return rank == 0 or contestant.variant is not Variant.THREADS


def _run(step: Step, num_steps: int) -> None:
    for _ in range(num_steps):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class PeakMemory:
    """Context that samples this process's memory: PSS on Linux, CUDA's own peak on a GPU. Bytes."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._is_over = threading.Event()

    def __enter__(self) -> "PeakMemory":
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        if torch.cuda.is_available():
            self.peak_bytes = torch.cuda.max_memory_allocated()

    def _sample(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(_SAMPLING_S)  # once more at the end: what is measured may be short
            self.peak_bytes = max(self.peak_bytes, proportional_set_size())


def proportional_set_size() -> int:
    """Return this process's memory in bytes, a shared page divided by the number of its users; 0 if unknown."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
