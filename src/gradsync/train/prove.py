"""``gradsync prove``: every way of training runs the same steps, and each is compared with one plain process.

The reference is as plain as can be: a bare module, ``backward()``, torch's clipping and torch's AdamW. What is compared
is the loss and the gradient norm of every step, and every parameter after the last one.
"""

import math
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from gradsync.comm.process import destroy_process_group, init_process_group
from gradsync.ddp.sharded_optimizer import ZeroRedundancyOptimizer
from gradsync.errors import UserCodeError
from gradsync.model.gpt2 import decay_groups
from gradsync.parallel.held import named_tensors
from gradsync.parallel.pieces import assembled, copied_to_cpu
from gradsync.train.optim import by_mesh
from gradsync.train.prove_cases import Case, GPTSubject, Subject, Trainee, UserSubject

LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4
PARAMETER_TOLERANCE = 1e-4
"""Relative to the value, and never less than a tenth of this in absolute terms."""

_LIMIT = 1.0
# A large epsilon: where a true gradient is zero (the keys' bias) AdamW would blow rounding noise up to whole steps.
_ADAMW: dict[str, Any] = {"lr": 1e-3, "eps": 1e-4, "betas": (0.9, 0.95)}
_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Trace:
    """What a run has computed."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor] = field(repr=False)


@dataclass(frozen=True)
class Difference:
    """The largest difference, in absolute terms and in units in the last place of the tensor's largest value.

    Of each value's own last place a sum that ends near zero would be millions away, and say nothing.
    """

    absolute: float = 0.0
    ulps: float = 0.0


@dataclass(frozen=True)
class Finding:
    """One row's result; ``error`` if it could not be run, ``first_parameter`` if one is beyond tolerance."""

    case: Case
    loss: Difference = Difference()
    norm: Difference = Difference()
    parameters: Difference = Difference()
    first_parameter: str | None = None
    has_passed: bool = False
    error: str | None = None


@dataclass(frozen=True)
class ProofJob:
    """What the ranks of a launch are to run; results are left in ``folder``."""

    cases: Sequence[Case]
    model: str | None
    num_steps: int
    device_type: str
    folder: Path


def run_cases(job: ProofJob) -> None:
    """Run the cases one after the other on the ranks of this launch; a case that fails ends all of it."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    device = device_of(job.device_type)
    subject: Subject = GPTSubject() if job.model is None else UserSubject(job.model)
    reference = run_plainly(subject, job.num_steps, device) if rank == 0 else None
    if rank == 0:
        reference_file(job.folder).touch()
    for number, case in enumerate(job.cases):
        if rank < case.world:
            _run_case(case, number, subject, job, device, reference)
        _wait_for(result_file(job.folder, case))


def run_jointly(rows: Sequence[Case], subject: Subject, num_steps: int, device: torch.device) -> list[Finding]:
    """Run cases one after the other on all ranks of the default process group; returns the findings on every rank.

    A case that raises ends the command, as any program that a launcher has started.
    """
    is_first = dist.get_rank() == 0
    reference = run_plainly(subject, num_steps, device) if is_first else None
    findings: list[Any] = []
    for case in rows:
        trace = run_trainee(case, subject, num_steps, device)
        findings.append(compare(case, trace, reference) if trace is not None and reference is not None else None)
    everyone: list[Any] = [findings]
    dist.broadcast_object_list(everyone, src=0)
    return list(everyone[0])


def reference_file(folder: Path) -> Path:
    """Return what lies there once the plain process has run."""
    return folder / "reference"


def result_file(folder: Path, case: Case) -> Path:
    """Return where a case's finding is left."""
    return folder / f"{''.join(c if c.isalnum() else '-' for c in case.name)}.finding"


def run_plainly(subject: Subject, num_steps: int, device: torch.device) -> Trace:
    """Return what one process computes on the whole batch, without a line of this project in the way."""
    module, mean_loss = subject.reference()
    module.to(device)
    optimizer = torch.optim.AdamW(decay_groups(module.parameters(), 0.1), **_ADAMW)
    losses, norms = [], []
    for step in range(num_steps):
        loss: Any = mean_loss(module, step)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), _LIMIT)))
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]) or not math.isfinite(norms[-1]):
            raise UserCodeError(
                f"step {step + 1} of one plain process has loss {losses[-1]} and gradient norm {norms[-1]}, so there "
                f"is nothing to compare with; give the model a batch and a loss that stay finite"
            )
        optimizer.step()
        optimizer.zero_grad()
    return Trace(losses, norms, {name: tensor.detach().cpu() for name, tensor in named_tensors(module).items()})


def run_trainee(case: Case, subject: Subject, num_steps: int, device: torch.device) -> Trace | None:
    """Return what the ranks of a case compute, on rank 0; all of them call it."""
    trainee = subject.trainee(case, device)
    optimizer = _optimizer(case, trainee)
    losses, norms = [], []
    for step in range(num_steps):
        found: list[Tensor] = []
        parts = subject.parts(step, case, trainee.data_rank, device)
        with _late(case, trainee):
            trainee.forward_backward(parts, subject.divisor, found.append)
        total = found[0].detach().to(torch.float64)
        if case.world > 1:
            dist.all_reduce(total)
        losses.append(float(total) / subject.divisor)
        is_sharded = isinstance(optimizer, ZeroRedundancyOptimizer)
        norms.append(float(optimizer.clip_grad_norm_(_LIMIT)) if is_sharded else trainee.clip_gradients(_LIMIT))
        optimizer.step()
        optimizer.zero_grad()
    return _gather(case, trainee, losses, norms)


def compare(case: Case, trace: Trace, reference: Trace) -> Finding:
    """Return how far a case is from the reference."""
    worst, first = Difference(), None
    for name, expected in reference.parameters.items():
        found = trace.parameters[name]
        difference = difference_of(found, expected)
        worst = Difference(max(worst.absolute, difference.absolute), max(worst.ulps, difference.ulps))
        if first is None and not _is_close(found, expected, PARAMETER_TOLERANCE):
            first = name
    loss, norm = (torch.tensor(values) for values in (trace.losses, trace.norms))
    expected_loss, expected_norm = (torch.tensor(values) for values in (reference.losses, reference.norms))
    has_passed = (
        first is None
        and _is_close(loss, expected_loss, LOSS_TOLERANCE)
        and _is_close(norm, expected_norm, NORM_TOLERANCE)
    )
    return Finding(
        case, difference_of(loss, expected_loss), difference_of(norm, expected_norm), worst, first, has_passed
    )


def difference_of(found: Tensor, expected: Tensor) -> Difference:
    """Return the largest difference of two tensors; infinite where one is not a number."""
    if found.numel() == 0:
        return Difference()
    absolute = float((found.double() - expected.double()).abs().max())
    if not math.isfinite(absolute):
        return Difference(math.inf, math.inf)
    largest = expected.abs().max().float()
    ulp = float(torch.nextafter(largest, torch.tensor(math.inf)) - largest)
    return Difference(absolute, absolute / ulp)


def _is_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance / 10)


def _run_case(
    case: Case, number: int, subject: Subject, job: ProofJob, device: torch.device, reference: Trace | None
) -> None:
    """Run a case in a process group of its own, and leave the finding; an error ends this process."""
    with _group(case, job.folder / f"store-{number}-{len(job.cases)}"):
        trace = run_trainee(case, subject, job.num_steps, device)
    if trace is not None and reference is not None:
        _leave(compare(case, trace, reference), job.folder)


def _leave(finding: Finding, folder: Path) -> None:
    path = result_file(folder, finding.case)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(finding))
    unfinished.rename(path)


def _wait_for(path: Path) -> None:
    """Wait for the ranks that run a case; one that fails ends the whole launch, this process as well."""
    while not path.exists():
        time.sleep(0.01)


@contextmanager
def _group(case: Case, store: Path) -> Iterator[None]:
    if case.world == 1:
        yield
        return
    init_process_group(
        case.backend,
        store=FileStore(str(store), case.world),
        rank=int(os.environ["RANK"]),
        world_size=case.world,
        timeout=_TIMEOUT,
    )
    yield
    destroy_process_group()


def _late(case: Case, trainee: Trainee) -> Any:
    return _synchronised_late(trainee) if case.syncs_late else nullcontext()


@contextmanager
def _synchronised_late(trainee: Trainee) -> Iterator[None]:
    ddp = trainee.ddp
    assert ddp is not None
    with ddp.no_sync():
        yield
    ddp.sync_gradients()


def _optimizer(case: Case, trainee: Trainee) -> Any:
    tensors = [held.tensor for held in trainee.held.values()]
    groups = [group for part in by_mesh(tensors) for group in decay_groups(part, 0.1)]
    if case.strategy == "zero" and trainee.ddp is not None:
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, ddp=trainee.ddp, **_ADAMW)
    return torch.optim.AdamW(groups, **_ADAMW)


def _gather(case: Case, trainee: Trainee, losses: list[float], norms: list[float]) -> Trace | None:
    own = {name: copied_to_cpu(held.cut.of(held.tensor)) for name, held in trainee.held.items()}
    everyone: list[Any] = [own]
    if case.world > 1:
        everyone = [None] * case.world
        dist.all_gather_object(everyone, own)
        if dist.get_rank() != 0:
            return None
    names = {name: None for part in everyone for name in part}
    whole = {name: assembled([part[name] for part in everyone if name in part]) for name in names}
    return Trace(losses, norms, whole)


def device_of(device_type: str) -> torch.device:
    """Return this rank's device, and make it the current one."""
    if device_type == "cpu":
        return torch.device("cpu")
    index = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
