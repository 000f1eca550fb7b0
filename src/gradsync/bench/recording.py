"""What recording costs: the same step with a recorder that does nothing, with the one that is always on, and exactly.

Alternating rounds in one run, as all measurements here. Beside the steps, which vary by more than the recorder costs,
the recorder's own calls of one pass are timed alone.
"""

import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from gradsync.bench.workloads import WORKLOADS, Workload
from gradsync.ddp.module import DistributedDataParallel
from gradsync.ddp.timeline import Telemetry, Timeline

_WARMUP_STEPS = 4
_NUM_ALONE = 2000
_EVERYTHING = 10**9


class NoTimeline(Timeline):
    """Records nothing."""

    def forward_begins(self) -> None:
        """Do nothing."""

    forward_ends = gradient_unsynced = optimizer_begins = optimizer_ends = local_ends = forward_begins
    pass_is_over = forward_begins

    def pass_begins(self, number: int, num_buckets: int) -> None:
        """Do nothing."""

    def bucket_ready(self, number: int) -> None:
        """Do nothing."""

    def bucket_launched(self, number: int, work: object) -> None:
        """Do nothing."""

    def wait_begins(self, number: int) -> None:
        """Do nothing."""

    def wait_ends(self, number: int) -> None:
        """Do nothing."""

    def pass_ends(self, telemetry: Telemetry) -> None:
        """Do nothing."""


@dataclass
class RecordingCost:
    """Seconds a step, one number a round; ``calls_s`` is what the recorder's calls of one pass take alone."""

    num_buckets: int
    calls_s: float
    step_s: dict[str, list[float]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The calls' share of a step."""
        return self.calls_s / statistics.median(self.step_s["off"])


def time_recording(name: str, num_rounds: int) -> RecordingCost:
    """Measure on the ranks of the default group."""
    workload = WORKLOADS[name]()
    torch.manual_seed(0)
    module = workload.build()
    ddp, optimizer = DistributedDataParallel(module), workload.optimizer(module)
    batch = workload.batch(dist.get_rank())
    exact = Timeline()
    exact.record(_EVERYTHING)
    recorders = {"off": NoTimeline(), "always on": Timeline(), "exact": exact}
    num_buckets = len(ddp.reducer.buckets)
    cost = RecordingCost(num_buckets, _calls_alone(num_buckets), {kind: [] for kind in recorders})
    _run(workload, ddp, optimizer, batch, _WARMUP_STEPS)
    for _ in range(num_rounds):
        for kind, recorder in recorders.items():
            ddp.reducer.timeline = recorder
            dist.barrier()
            start_s = time.perf_counter()
            _run(workload, ddp, optimizer, batch, workload.steps_per_sample)
            cost.step_s[kind].append((time.perf_counter() - start_s) / workload.steps_per_sample)
    return cost


def _run(
    workload: Workload, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: object, num_steps: int
) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        workload.loss(ddp, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _calls_alone(num_buckets: int) -> float:
    """Return the seconds that the recorder's calls of one pass take."""
    timeline, work, telemetry = Timeline(), _Done(), ((0.0,) * 4,) * 2
    start_s = time.perf_counter()
    for number in range(_NUM_ALONE):
        timeline.optimizer_begins()
        timeline.optimizer_ends()
        timeline.forward_begins()
        timeline.forward_ends()
        timeline.pass_begins(number, num_buckets)
        for bucket in range(num_buckets):
            timeline.bucket_ready(bucket)
            timeline.bucket_launched(bucket, work)
        timeline.local_ends()
        timeline.local_times()
        for bucket in range(num_buckets):
            timeline.wait_begins(bucket)
            timeline.wait_ends(bucket)
        timeline.pass_ends(telemetry)
        timeline.pass_is_over()
    return (time.perf_counter() - start_s) / _NUM_ALONE


class _Done:
    def is_completed(self) -> bool:
        return True
