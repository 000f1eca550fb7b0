"""What the records of the last passes mean: how much communication was hidden, which bucket was not, who is late.

Pure: from records to findings, and from findings to one English sentence.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradsync.ddp.passes import BucketMap, PassRecord, RankTimes, median
from gradsync.ddp.timeline import LOCAL_PHASES

_LATE_SHARE = 0.1
"""A rank is called late if it holds the others up by this share of a step ..."""
_LATE_S = 0.5e-3
"""... and by at least this."""
_EXPOSED_SHARE = 0.02
"""Waiting below this share of a step is not worth a word on buckets."""


@dataclass(frozen=True)
class Group:
    """A process group that the engine uses; ``carries`` says for what."""

    carries: str
    backend: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for, the phase in which it loses the time, and how much it is a step."""

    rank: int
    phase: str
    delay_s: float


@dataclass(frozen=True)
class Findings:
    """Medians over the passes of this rank; None where nothing can be said."""

    step_s: float
    exposed_s: float | None
    communication_s: float | None
    hidden_s: float | None
    worst_bucket: int | None
    """The bucket that was waited for longest."""
    worst_share: float
    """Its share of the exposed time."""
    worst_parameter: str | None
    """The largest parameter in it."""
    straggler: Straggler | None


@dataclass(frozen=True)
class Report:
    """What ``ddp.report()`` returns: the last passes of this rank, and what all ranks have told each other."""

    rank: int
    world_size: int
    passes: tuple[PassRecord, ...]
    buckets: tuple[BucketMap, ...]
    groups: tuple[Group, ...]
    ranks: tuple[RankTimes, ...]

    @property
    def findings(self) -> Findings | None:
        """What the passes mean; None if there was none."""
        return find(self.passes, self.buckets, self.ranks)

    @property
    def straggler(self) -> Straggler | None:
        """The rank that the others wait for, if there is one."""
        return None if self.findings is None else self.findings.straggler

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.world_size == 1:
            return "one rank: there is nothing to communicate"
        return say(self.findings, len(self.buckets))

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain numbers and texts."""
        findings = self.findings
        return {
            **asdict(self),
            "passes": [_pass_json(record) for record in self.passes],
            "findings": None if findings is None else asdict(findings),
            "verdict": self.verdict,
        }


def _pass_json(record: PassRecord) -> dict[str, Any]:
    extras = {"exposed_s": record.exposed_s, "communication_s": record.communication_s, "hidden_s": record.hidden_s}
    return {**asdict(record), **extras}


def find(passes: Sequence[PassRecord], buckets: Sequence[BucketMap], ranks: Sequence[RankTimes]) -> Findings | None:
    """Return the medians over the passes that ran with the present buckets and knew what to expect."""
    passes = steady(passes, len(buckets))
    if not passes:
        return None
    step_s = median([p.duration_s for p in passes])
    exposed_s = _median_of_known([p.exposed_s for p in passes])
    communication_s = _median_of_known([p.communication_s for p in passes])
    hidden_s = None if communication_s is None or exposed_s is None else max(communication_s - exposed_s, 0.0)
    waits = [_median_of_known([p.buckets[number].wait_s for p in passes]) or 0.0 for number in range(len(buckets))]
    worst = max(range(len(waits)), key=waits.__getitem__) if sum(waits) > _EXPOSED_SHARE * step_s else None
    return Findings(
        step_s=step_s,
        exposed_s=exposed_s,
        communication_s=communication_s,
        hidden_s=hidden_s,
        worst_bucket=worst,
        worst_share=0.0 if worst is None else waits[worst] / sum(waits),
        worst_parameter=None if worst is None else buckets[worst].largest,
        straggler=find_straggler(ranks, step_s),
    )


def _median_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def steady(passes: Sequence[PassRecord], num_buckets: int) -> list[PassRecord]:
    """Leave out passes of other plans, and the first ones if there are enough: nothing was learned then."""
    same = [p for p in passes if len(p.buckets) == num_buckets]
    return [p for p in same if p.number >= 2] or same


def find_straggler(ranks: Sequence[RankTimes], step_s: float) -> Straggler | None:
    """Return the rank that needs longest by itself, if that is worth a word, against the median of the others."""
    if len(ranks) < 2:
        return None
    slow = max(ranks, key=lambda times: times.local_s)
    others = [times for times in ranks if times is not slow]
    delay_s = slow.local_s - median([times.local_s for times in others])
    if delay_s < max(_LATE_SHARE * step_s, _LATE_S):
        return None
    losses = {phase: slow.phase_s(phase) - median([o.phase_s(phase) for o in others]) for phase in LOCAL_PHASES}
    return Straggler(slow.rank, str(max(losses, key=losses.__getitem__)), delay_s)


def say(findings: Findings | None, num_buckets: int) -> str:
    """Return the findings in one sentence."""
    if findings is None:
        return "no pass was recorded"
    parts = [_about_exposure(findings)]
    if findings.worst_bucket is not None:
        which = "the last bucket" if findings.worst_bucket == num_buckets - 1 else f"bucket {findings.worst_bucket}"
        share = f"{findings.worst_share:.0%}".replace("%", " %")
        parts.append(f"{which}, {share} of the exposed time, holds {findings.worst_parameter}")
    if findings.straggler is not None:
        late = findings.straggler
        parts.append(f"rank {late.rank} is late by {milliseconds(late.delay_s)} in {late.phase}")
    return "; ".join(parts)


def _about_exposure(findings: Findings) -> str:
    if findings.exposed_s is None:
        return f"a step takes {milliseconds(findings.step_s)}; what a GPU waits for is known while profile() records"
    if findings.communication_s is None or findings.hidden_s is None:
        return f"{milliseconds(findings.exposed_s)} of a step of {milliseconds(findings.step_s)} were spent waiting"
    hidden, total = findings.hidden_s, findings.communication_s
    return f"{milliseconds(hidden)} of {milliseconds(total)} communication hidden"


def milliseconds(seconds: float) -> str:
    """Return a time as people say it in this context: 4.1 ms, 120 ms, 0.05 ms."""
    ms = seconds * 1e3
    return f"{ms:.2f} ms" if ms < 1 else f"{ms:.1f} ms" if ms < 100 else f"{ms:,.0f} ms"
