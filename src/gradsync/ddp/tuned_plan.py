"""The collective part of ``bucket_cap_mb="auto"``: measure the link, agree on the times, make the plan.

All ranks run this at the end of the same pass. What is chosen is rank 0's choice on every rank.
"""

import logging
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gradsync.comm.groups import broadcast_tensors, reducing
from gradsync.ddp.plan import MIB, Plan, plan_of
from gradsync.ddp.tuning import Link, choose_ends, fit_link

if TYPE_CHECKING:
    from gradsync.ddp.reducer import Reducer

logger = logging.getLogger("gradsync")

_SMALL_BYTES = 128 * 1024
_LARGE_BYTES = 8 * MIB
_NUM_REPEATS = 3


def tuned_plan(reducer: "Reducer", ready_s: list[float]) -> Plan:
    """Return the plan whose last bucket is done first; ``ready_s`` ends with the duration of backward. Collective."""
    latest = _latest(reducer, ready_s)
    link = _measure_link(reducer)
    specs = reducer.specs
    order = [index for bucket in reducer.plan.buckets for index in bucket.indices]
    ends = choose_ends([latest[i] for i in order], [specs[i].num_bytes for i in order], latest[-1], link)
    is_end = torch.zeros(len(order), dtype=torch.uint8, device="cpu")
    is_end[[end - 1 for end in ends]] = 1
    agreed = broadcast_tensors(reducer.control_group, [is_end], source=0)[0].tolist()
    plan = plan_of(specs, _groups(order, agreed), reducer.plan.sparse)
    if reducer.rank == 0:
        sizes = ", ".join(f"{bucket.num_bytes / MIB:.1f}" for bucket in plan.buckets)
        logger.info(
            "bucket_cap_mb='auto': buckets of %s MiB for a link with %.3f ms latency and %.2f GB/s",
            sizes,
            link.latency_s * 1e3,
            1e-9 / max(link.s_per_byte, 1e-15),
        )
    return plan


def _latest(reducer: "Reducer", seconds: list[float]) -> list[float]:
    """Return, for each time, that of the rank on which it is longest: a collective begins when all ranks are there."""
    times = torch.tensor(seconds, dtype=torch.float64, device="cpu")
    reducer.groups.wait_for_words(reducer.control_group.allreduce([times], reducing(dist.ReduceOp.MAX)))
    return [float(value) for value in times.tolist()]


def _measure_link(reducer: "Reducer") -> Link:
    small, large = (_seconds(reducer, num_bytes) for num_bytes in (_SMALL_BYTES, _LARGE_BYTES))
    *sums, copy_s = _latest(reducer, [*small, *large, _copy_seconds(reducer)])
    return fit_link(_SMALL_BYTES, sums[:_NUM_REPEATS], _LARGE_BYTES, sums[_NUM_REPEATS:], copy_s)


def _seconds(reducer: "Reducer", num_bytes: int) -> list[float]:
    device = reducer.plan.buckets[0].device
    flat = reducer.groups.allocate(num_bytes // 4, torch.float32, device)
    samples = []
    for _ in range(1 + _NUM_REPEATS):
        start_s = time.perf_counter()
        reducer.groups.waits.wait(reducer.groups.sum_bucket(flat, True))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - start_s)
    return samples[1:]


def _copy_seconds(reducer: "Reducer") -> float:
    """Return what it takes to move gradients of the larger size into a bucket; on a GPU nobody waits for that."""
    device = reducer.plan.buckets[0].device
    if device.type == "cuda":
        return 0.0
    gradients = torch.ones(_LARGE_BYTES // 4, dtype=torch.float32, device=device)
    flat = reducer.groups.allocate(_LARGE_BYTES // 4, torch.float32, device)
    samples = []
    for _ in range(1 + _NUM_REPEATS):
        start_s = time.perf_counter()
        torch.mul(gradients, 0.5, out=flat)
        samples.append(time.perf_counter() - start_s)
    return min(samples)


def _groups(order: list[int], is_end: list[int]) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    for index, ends in zip(order, is_end, strict=True):
        groups[-1].append(index)
        if ends:
            groups.append([])
    return [group for group in groups if group]
