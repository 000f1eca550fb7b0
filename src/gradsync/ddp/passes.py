"""Records of passes in seconds, made from the raw moments of a ``Timeline``: what ``ddp.report()`` returns.

Pure: numbers in, frozen dataclasses out. What the numbers mean is said in ``report``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.ddp.plan import Plan
from gradsync.ddp.timeline import LOCAL_PHASES, PHASES, RawPass, Telemetry


@dataclass(frozen=True)
class Span:
    """A stretch of one phase; seconds since the window began."""

    phase: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class BucketTimes:
    """One bucket in one pass; seconds since the window began, None for what was not seen.

    ``ready_s`` is None for a bucket that nothing but the end of backward completes: all buckets of a first pass,
    and always the last bucket. ``done_s`` is when the collective was *seen* to be complete: exactly while somebody
    profiles, at the next launch or wait otherwise. ``wait_s`` is how long the rank waited for it; on a GPU that is
    known only while somebody profiles.
    """

    number: int
    ready_s: float | None
    launched_s: float | None
    done_s: float | None
    wait_s: float | None


@dataclass(frozen=True)
class PassRecord:
    """One pass of this rank, with the window before it: optimizer, data, forward, backward, finish."""

    number: int
    began_s: float
    """When the window began, on this process's ``time.perf_counter``."""
    duration_s: float
    is_exact: bool
    """Whether ``done_s`` is exact."""
    spans: tuple[Span, ...]
    buckets: tuple[BucketTimes, ...]

    def total_s(self, phase: str) -> float:
        """Seconds spent in a phase."""
        return sum(span.end_s - span.start_s for span in self.spans if span.phase == phase)

    @property
    def data_s(self) -> float:
        """Seconds from the last step to the forwards: waiting for data, and whatever else the loop does there."""
        return self.total_s("data")

    @property
    def forward_s(self) -> float:
        """Seconds in forward and loss."""
        return self.total_s("forward")

    @property
    def backward_s(self) -> float:
        """Seconds in backward until the last gradient of this rank had arrived; waiting is not in it."""
        return self.total_s("backward")

    @property
    def optimizer_s(self) -> float:
        """Seconds in the optimizer's step before this pass."""
        return self.total_s("optimizer")

    @property
    def exposed_s(self) -> float | None:
        """Seconds of communication that nothing hid: this rank did nothing but wait. None if that is not known."""
        waits = [bucket.wait_s for bucket in self.buckets]
        return None if None in waits else sum(wait for wait in waits if wait is not None)

    @property
    def communication_s(self) -> float | None:
        """Seconds in which a bucket was under way (several at once count once); None if that was not seen exactly."""
        if not self.is_exact or any(b.launched_s is None or b.done_s is None for b in self.buckets):
            return None
        return _union([(b.launched_s or 0.0, b.done_s or 0.0) for b in self.buckets])

    @property
    def hidden_s(self) -> float | None:
        """Seconds of communication during which this rank computed; None if that was not seen exactly."""
        total, exposed = self.communication_s, self.exposed_s
        return None if total is None or exposed is None else max(total - exposed, 0.0)


@dataclass(frozen=True)
class ParameterPlace:
    """Where a parameter's gradient lies in its bucket."""

    name: str
    num_bytes: int
    offset_bytes: int


@dataclass(frozen=True)
class BucketMap:
    """One bucket of the plan: what travels in it."""

    number: int
    num_bytes: int
    dtype: str
    parameters: tuple[ParameterPlace, ...]

    @property
    def largest(self) -> str:
        """The name of the parameter that takes the most room."""
        return max(self.parameters, key=lambda place: place.num_bytes).name


@dataclass(frozen=True)
class RankTimes:
    """Median seconds of one rank in each local phase of a window, as the rank has told the others."""

    rank: int
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def local_s(self) -> float:
        """All of them: what the rank needs by itself from one pass to the next."""
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s

    def phase_s(self, phase: str) -> float:
        """Return the seconds of a phase by its name."""
        seconds: float = getattr(self, f"{phase}_s")
        return seconds


def record_of(raw: RawPass, is_on_host: bool = True) -> PassRecord:
    """Turn the moments of a pass into a record; ``is_on_host`` as in ``Timeline``."""
    began = raw.began_ns
    waits = _host_waits(raw) if is_on_host else _device_waits(raw)

    def seconds(moment: int) -> float | None:
        return (moment - began) * 1e-9 if moment else None

    return PassRecord(
        number=raw.number,
        began_s=began * 1e-9,
        duration_s=(raw.ended_ns - began) * 1e-9,
        # the pieces of a sharded optimizer's collectives have no future to be told by
        is_exact=raw.is_exact and all(raw.done),
        spans=tuple(Span(PHASES[phase], (s - began) * 1e-9, (e - began) * 1e-9) for phase, s, e in raw.spans),
        buckets=tuple(
            BucketTimes(
                number,
                seconds(raw.ready[number]),
                seconds(raw.launched[number]),
                # a collective that was never looked at in time was over when waiting for it was
                seconds(raw.done[number] or raw.wait_ended[number]) if is_on_host else None,
                waits[number],
            )
            for number in range(raw.num_buckets)
        ),
    )


def _host_waits(raw: RawPass) -> list[float | None]:
    return [max(end - begin, 0) * 1e-9 for begin, end in zip(raw.wait_began, raw.wait_ended, strict=True)]


def _device_waits(raw: RawPass) -> list[float | None]:
    known = [] if raw.device_waits is None else raw.device_waits.seconds()
    return [*known] if len(known) == raw.num_buckets else [None] * raw.num_buckets


def map_of(plan: Plan) -> tuple[BucketMap, ...]:
    """Return which parameter lies where in the buckets of a plan."""
    return tuple(
        BucketMap(
            number,
            bucket.num_bytes,
            str(bucket.dtype).removeprefix("torch."),
            tuple(
                ParameterPlace(plan.specs[index].name, plan.specs[index].num_bytes, offset * bucket.dtype.itemsize)
                for index, offset in zip(bucket.indices, bucket.offsets, strict=True)
            ),
        )
        for number, bucket in enumerate(plan.buckets)
    )


def rank_times(telemetry: Sequence[Telemetry]) -> tuple[RankTimes, ...]:
    """Return every rank's median times, from what the ranks have told each other in some passes."""
    if not telemetry:
        return ()
    return tuple(
        RankTimes(
            rank, **{f"{phase}_s": median([p[rank][k] for p in telemetry]) for k, phase in enumerate(LOCAL_PHASES)}
        )
        for rank in range(len(telemetry[-1]))
    )


def median(values: Sequence[float]) -> float:
    """Return the median; of an even number the lower one, so that it is a value that was seen."""
    return sorted(values)[(len(values) - 1) // 2]


def _union(intervals: Sequence[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
