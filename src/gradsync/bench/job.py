"""What every rank of ``gradsync bench`` runs; started by the command, or by torchrun."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsync.bench.collectives import CollectiveTiming, copy_bandwidth, time_collectives
from gradsync.bench.recording import RecordingCost, time_recording
from gradsync.bench.rounds import Contestant, Timing, time_contestants
from gradsync.bench.workloads import WORKLOADS, Workload, workload_of_factory
from gradsync.comm.backends import choose_backend
from gradsync.comm.process import destroy_process_group, init_process_group


@dataclass(frozen=True)
class BenchJob:
    """What to measure; ``model`` is the user's ``module:function`` and takes the place of a workload."""

    contestants: tuple[Contestant, ...]
    workload: str
    num_rounds: int
    model: str | None = None
    measures_memory: bool = False


@dataclass(frozen=True)
class CollectivesJob:
    """Which collectives to measure."""

    backends: tuple[str, ...]
    sizes: tuple[int, ...]
    operations: tuple[str, ...]
    num_rounds: int


@dataclass(frozen=True)
class RecordingJob:
    """Whose step to measure with and without a recorder."""

    workload: str
    num_rounds: int


@dataclass
class CollectivesResult:
    """Timings, and how fast one rank copies while the others do."""

    timings: list[CollectiveTiming] = field(default_factory=list)
    copy_bytes_per_s: float = 0.0


def run_bench(job: BenchJob) -> list[Timing]:
    """Return this rank's timings."""
    workload = _workload(job)  # before the ranks meet: all fail alike
    result: list[Timing] = _on_rank(
        lambda: time_contestants(job.contestants, workload, job.num_rounds, job.measures_memory),
        [contestant.backend for contestant in job.contestants],
    )
    return result


def run_collectives(job: CollectivesJob) -> CollectivesResult:
    """Return this rank's timings of single collectives."""
    result: CollectivesResult = _on_rank(lambda: _collectives(job), job.backends)
    return result


def run_recording(job: RecordingJob) -> RecordingCost:
    """Return this rank's timings of steps with and without a recorder."""
    result: RecordingCost = _on_rank(lambda: time_recording(job.workload, job.num_rounds))
    return result


def _collectives(job: CollectivesJob) -> CollectivesResult:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    timings = time_collectives(job.backends, job.sizes, job.operations, job.num_rounds, device)
    return CollectivesResult(timings, copy_bandwidth())


def _workload(job: BenchJob) -> Workload:
    if job.model is None:
        return WORKLOADS[job.workload]()
    return workload_of_factory(job.model)


def _on_rank(measure: Any, backends: Iterable[str | None] = ()) -> Any:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    init_process_group("auto" if torch.cuda.is_available() else "gloo")
    for backend in backends:
        if backend is not None:
            choose_backend(backend)  # makes it known to torch where torch does not know it
    result = measure()
    destroy_process_group()
    return result
