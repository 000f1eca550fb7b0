"""Times single collectives over sizes and backends, with the machine's copy bandwidth as the limit."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

KIB = 2**10
MIB = 2**20
SIZES = (KIB, 4 * KIB, 64 * KIB, MIB, 25 * MIB, 100 * MIB, 256 * MIB)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")

_ROUND_TARGET_S = 0.05

# torch 2.12 has given them other names
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass
class CollectiveTiming:
    """Samples of one operation on one backend: seconds a call, one a round. ``num_bytes`` is the whole tensor.

    ``backend`` is followed by a star where the tensors lie in memory of their own instead of the group's shared one.
    """

    operation: str
    backend: str
    num_bytes: int
    call_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median time of a call in seconds."""
        return statistics.median(self.call_s)


def time_collectives(
    backends: Sequence[str], sizes: Sequence[int], operations: Sequence[str], num_rounds: int, device: torch.device
) -> list[CollectiveTiming]:
    """Measure every operation at every size, the backends alternating; every rank calls it."""
    groups = {backend: dist.new_group(backend=backend) for backend in backends}
    ways = {way: made for backend, group in groups.items() for way, made in _ways(backend, group, device).items()}
    results: list[CollectiveTiming] = []
    for operation in operations:
        for num_bytes in sizes:
            calls = {way: _make_call(operation, num_bytes, group, ones) for way, (group, ones) in ways.items()}
            timings = {way: CollectiveTiming(operation, way, num_bytes) for way in ways}
            repeats = {b: _repeats(call) for b, call in calls.items()}
            for _ in range(num_rounds):
                for backend, call in calls.items():
                    timings[backend].call_s.append(_time(call, repeats[backend], device))
            results += timings.values()
    return results


def copy_bandwidth(num_bytes: int = 100 * MIB, num_rounds: int = 9) -> float:
    """Return how many bytes a second this process copies while the other ranks do the same."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    samples = []
    for _ in range(num_rounds):
        dist.barrier()
        start_s = time.perf_counter()
        target.copy_(source)
        samples.append(time.perf_counter() - start_s)
    return num_bytes / statistics.median(samples)


def _ways(backend: str, group: Any, device: torch.device) -> dict[str, tuple[Any, Callable[[int], torch.Tensor]]]:
    """Return the group, and where its tensors lie: in its shared memory, as the engine's buckets do, and elsewhere."""
    own: tuple[Any, Callable[[int], torch.Tensor]] = (group, lambda numel: torch.ones(numel, device=device))
    if not hasattr(group, "allocate"):
        return {backend: own}
    return {backend: (group, lambda numel: group.allocate(numel, torch.float32).fill_(1.0)), f"{backend}*": own}


def _make_call(operation: str, num_bytes: int, group: Any, ones: Callable[[int], torch.Tensor]) -> Callable[[], Any]:
    world = group.size()
    numel = max(num_bytes // 4 // world, 1) * world
    whole, part = ones(numel), ones(numel // world)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "reduce_scatter": lambda: _reduce_scatter(part, whole, group=group),
        "all_gather": lambda: _all_gather(whole, part, group=group),
        "broadcast": lambda: dist.broadcast(whole, group_src=0, group=group),
    }
    return calls[operation]


def _repeats(call: Callable[[], Any]) -> int:
    """Return how many calls make a sample long enough; the same on all ranks."""
    call()
    start_s = time.perf_counter()
    call()
    wish = torch.tensor([_ROUND_TARGET_S / max(time.perf_counter() - start_s, 1e-6)], dtype=torch.float64)
    dist.broadcast(wish, 0)
    return min(max(int(wish.item()), 1), 200)


def _time(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / repeats
