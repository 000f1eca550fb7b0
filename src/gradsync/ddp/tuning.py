"""Choosing where one bucket ends and the next begins, for ``bucket_cap_mb="auto"``.

After the ranks have agreed on the order of gradients, a few passes note when each gradient arrives, and a few
collectives tell what the link costs: a latency for each, and a time for each byte. With both it can be computed when
the last bucket of any partition would be done; the best partition is found exactly, by dynamic programming over the
order: the earlier a prefix is done the better for whatever follows, so only the best way to send each prefix matters.

Knows nothing of groups and reducers: who has measured tells it seconds and bytes.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_NUM_PASSES = 3
_MAX_ATOMS = 256
_LEAST_LATENCY_S = 1e-4
"""What a bucket costs its rank however fast the link is: the launch, the wait, the threads that are woken."""


@dataclass(frozen=True)
class Link:
    """What one all-reduce costs: ``latency_s`` and, for each byte, ``s_per_byte``; before it, copying each byte."""

    latency_s: float
    s_per_byte: float
    copy_s_per_byte: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Return the time for an all-reduce of this size."""
        return self.latency_s + self.s_per_byte * num_bytes

    def copying(self, num_bytes: float) -> float:
        """Return the time from the last gradient of a bucket to its departure."""
        return self.copy_s_per_byte * num_bytes


def fit_link(
    small_bytes: int, small_s: Sequence[float], large_bytes: int, large_s: Sequence[float], copy_s: float = 0.0
) -> Link:
    """Return the link that explains measurements at two sizes; ``copy_s`` is what copying the larger one took."""
    small, large = statistics.median(small_s), statistics.median(large_s)
    s_per_byte = max(large - small, 0.0) / max(large_bytes - small_bytes, 1)
    latency_s = max(small - s_per_byte * small_bytes, _LEAST_LATENCY_S)
    return Link(latency_s, s_per_byte, copy_s / large_bytes)


class ReadyTimes:
    """When the gradient of each parameter arrived, in seconds since the backward began, over a few passes."""

    def __init__(self, num_parameters: int) -> None:
        self.current = [0.0] * num_parameters
        """Of the pass that runs; 0 for a gradient that has not arrived."""
        self._passes: list[list[float]] = []

    @property
    def is_complete(self) -> bool:
        """Whether enough passes were seen."""
        return len(self._passes) >= _NUM_PASSES

    def end_pass(self, duration_s: float) -> None:
        """Take note that the backward is over; what has not arrived was not waited for until then."""
        self._passes.append([seconds or duration_s for seconds in self.current] + [duration_s])
        self.current = [0.0] * len(self.current)

    def medians(self) -> list[float]:
        """Return the median for each parameter, and last the duration of backward."""
        return [statistics.median(column) for column in zip(*self._passes, strict=True)]


def choose_ends(ready_s: Sequence[float], num_bytes: Sequence[int], backward_s: float, link: Link) -> list[int]:
    """Return where buckets end: positions in the order of gradients, the last one behind all of them.

    ``ready_s`` and ``num_bytes`` follow the order of gradients; the last bucket always leaves at ``backward_s``.
    Buckets travel one after the other, none before its last gradient is there.
    """
    atoms = _atoms(num_bytes)
    sizes = [sum(num_bytes[start:end]) for start, end in zip([0, *atoms], atoms, strict=False)]
    latest: list[float] = []
    for start, end in zip([0, *atoms], atoms, strict=False):
        latest.append(max([*latest[-1:], *ready_s[start:end]], default=0.0))
    if latest:
        latest[-1] = max(latest[-1], backward_s)
    done = [0.0]
    begins = [0]
    for end in range(1, len(atoms) + 1):
        best, begin_of_best, size = float("inf"), 0, 0
        for begin in range(end - 1, -1, -1):
            size += sizes[begin]
            seconds = max(done[begin], latest[end - 1] + link.copying(size)) + link.seconds(size)
            if seconds < best:
                best, begin_of_best = seconds, begin
        done.append(best)
        begins.append(begin_of_best)
    return _walk_back(begins, atoms)


def _atoms(num_bytes: Sequence[int]) -> list[int]:
    """Return the positions at which a bucket may end: of many small neighbours not each."""
    least = sum(num_bytes) / _MAX_ATOMS if len(num_bytes) > _MAX_ATOMS else 0
    ends, size = [], 0
    for position, nbytes in enumerate(num_bytes, start=1):
        size += nbytes
        if size >= least or position == len(num_bytes):
            ends.append(position)
            size = 0
    return ends


def _walk_back(begins: Sequence[int], atoms: Sequence[int]) -> list[int]:
    ends = []
    end = len(atoms)
    while end > 0:
        ends.append(atoms[end - 1])
        end = begins[end]
    return ends[::-1]
