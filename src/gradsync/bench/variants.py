"""The ways to train that are compared: each turns a workload into a step to be timed."""

import enum
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradsync.bench.workloads import Workload
from gradsync.ddp.module import DistributedDataParallel
from gradsync.ddp.sharded_optimizer import ZeroRedundancyOptimizer

Step = Callable[[], None]
_NUM_LOGGED = 5


class Variant(enum.StrEnum):
    """One way to train the same model."""

    BARE = "bare"
    """The module alone: no synchronisation, so the replicas drift apart. What is left is the cost of the model."""
    TORCH = "torch"
    """torch's DistributedDataParallel on the backend named behind the slash."""
    GRADSYNC = "gradsync"
    """gradsync's DistributedDataParallel on the backend named behind the slash."""
    ZERO = "zero"
    """gradsync's DistributedDataParallel with the ZeroRedundancyOptimizer, on the backend named behind the slash."""
    THREADS = "threads"
    """The older way, one process with a thread a replica: what torch's DataParallel does on GPUs."""


@dataclass(frozen=True)
class Training:
    """One training step of this rank, and the seconds of it in which the rank did nothing but wait for others."""

    step: Step
    exposed_s: Callable[[], float | None] = lambda: None
    """None where nothing is known; called when the steps are over."""


def make_training(variant: Variant, workload: Workload, group: Any, rank: int) -> Training:
    """Return one training step of this rank."""
    torch.manual_seed(0)
    module = workload.build()
    if variant is Variant.THREADS:
        return Training(_threads_step(workload, module, group.size()))
    batch = workload.batch(rank)
    replica, optimizer = _train_with(variant, workload, module, group)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(replica, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    if isinstance(replica, DistributedDataParallel):
        return Training(step, lambda: _exposed_s(replica))
    if isinstance(replica, nn.parallel.DistributedDataParallel):
        return Training(step, lambda: _exposed_s_of_torch(replica, step))
    return Training(step)


def _exposed_s(replica: DistributedDataParallel) -> float | None:
    findings = replica.report().findings
    return None if findings is None else findings.exposed_s


def _exposed_s_of_torch(replica: nn.parallel.DistributedDataParallel, step: Step) -> float | None:
    """torch's class times its own backward, if it is told to do so in every step: here some steps more."""
    replica._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]
    for _ in range(_NUM_LOGGED):
        step()
    data = replica._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    communication, overlap = data.get("backward_comm_time"), data.get("backward_compute_comm_overlap_time")
    return None if communication is None or overlap is None else max(communication - overlap, 0) / 1e9


def _train_with(
    variant: Variant, workload: Workload, module: nn.Module, group: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    if variant is Variant.ZERO:
        ddp = DistributedDataParallel(module, process_group=group)
        options = workload.optimizer_options
        return ddp, ZeroRedundancyOptimizer(ddp.parameters(), workload.optimizer_class, ddp=ddp, **options)
    optimizer = workload.optimizer(module)
    if variant is Variant.TORCH:
        return nn.parallel.DistributedDataParallel(module, process_group=group), optimizer
    if variant is Variant.GRADSYNC:
        return DistributedDataParallel(module, process_group=group), optimizer
    return module, optimizer


def _threads_step(workload: Workload, module: nn.Module, num_replicas: int) -> Step:
    """One thread a replica in this process: copy the parameters out, run, sum the gradients, step."""
    replicas = [module, *(deepcopy(module) for _ in range(num_replicas - 1))]
    batches = [workload.batch(rank) for rank in range(num_replicas)]
    optimizer = workload.optimizer(module)

    def run(replica: nn.Module, batch: Any) -> None:
        (workload.loss(replica, batch) / num_replicas).backward()  # type: ignore[no-untyped-call]

    def step() -> None:
        for replica in replicas:
            replica.zero_grad()
        threads = [threading.Thread(target=run, args=pair) for pair in zip(replicas, batches, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for replica in replicas[1:]:
            for mine, theirs in zip(module.parameters(), replica.parameters(), strict=True):
                assert mine.grad is not None and theirs.grad is not None
                mine.grad += theirs.grad
        optimizer.step()
        with torch.no_grad():
            for replica in replicas[1:]:
                for mine, theirs in zip(module.parameters(), replica.parameters(), strict=True):
                    theirs.copy_(mine)

    return step


def new_group(backend: str) -> Any:
    """Return a group of all ranks on this backend."""
    return dist.new_group(backend=backend)
