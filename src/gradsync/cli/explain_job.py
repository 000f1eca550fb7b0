"""What every rank of ``gradsync explain`` runs: a few real steps, looked at from inside by hooks of its own.

Returns plain numbers; the command puts the ranks' together and writes the page.
"""

import os
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradsync.bench.workloads import Workload, workload_of_factory
from gradsync.comm.process import destroy_process_group, init_process_group
from gradsync.ddp.module import DistributedDataParallel
from gradsync.ddp.plan import MIB
from gradsync.model.gpt2 import GPT2, GPT2Config
from gradsync.train.profiling import profile

_NUM_PIECES = 8
_ONE_VALUE = 1.0


@dataclass(frozen=True)
class ExplainJob:
    """What to run; ``model`` is ``toy``, ``gpt``, or the user's ``module:function``."""

    model: str
    steps: int
    backend: str


class SimpleModel(nn.Module):
    """The model of many first steps: two linear layers with a ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map B x 10 to B x 1."""
        outputs: torch.Tensor = self.net2(self.relu(self.net1(inputs)))
        return outputs


def explain_on_rank(job: ExplainJob) -> dict[str, Any]:
    """Run the steps and return what this rank saw."""
    workload = _workload(job.model)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.manual_seed(int(os.environ["RANK"]))
    module = workload.build()
    init_process_group(job.backend, device_type=_device_type(module))
    found = _Walk(job, workload).run(module)
    destroy_process_group()
    return found


@dataclass(frozen=True)
class _Shown:
    """The one value of a parameter that the page follows."""

    name: str
    parameter: nn.Parameter
    index: tuple[int, ...]

    def gradient(self) -> float | None:
        """Its gradient as it is now."""
        return _value(self.parameter.grad, self.index)


class _Walk:
    """The steps of the explanation, in the order in which the page tells them."""

    def __init__(self, job: ExplainJob, workload: Workload) -> None:
        self._job = job
        self._rank = dist.get_rank()
        self._workload = workload
        self._losses: list[float] = []
        self._arrivals: list[list[tuple[str, float]]] = []

    def run(self, module: nn.Module) -> dict[str, Any]:
        """Train the module as this rank has built it, and more of its kind."""
        self._cap_bytes = None if ":" in self._job.model else _small_cap(module)
        built = _state(module)
        ddp = self._wrap(module)
        wrapped = _state(module)
        optimizer = self._workload.optimizer(module)
        with profile(ddp, steps=self._job.steps) as recorded, self._noting_arrivals(ddp):
            for _ in range(self._job.steps):
                self._step(ddp, optimizer)
        shown = _shown_value(module)
        found = {
            "rank": self._rank,
            "process": self._process(built, wrapped, _state(module), shown),
            "recording": recorded.recording,
            "arrivals": self._arrivals,
            "num_parameters": sum(p.numel() for p in module.parameters()),
            "num_tensors": len(list(module.parameters())),
            "cap_bytes": self._cap_bytes,
            "shown": {"name": shown.name, "index": list(shown.index), **_place_of(ddp, shown.name)},
            "last_loss": self._losses[-1],
        }
        found["average"] = self._average(ddp, optimizer, shown)
        found["average_pass"] = ddp.reducer.num_passes - 1
        found["no_sync"] = self._no_sync(ddp, optimizer, shown)
        found["unused"] = self._unused()
        return found

    def _wrap(self, module: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(module, bucket_cap_mb=None if self._cap_bytes is None else self._cap_bytes / MIB)

    def _loss(self, ddp: nn.Module, num_batch: int = 0) -> torch.Tensor:
        return self._workload.loss(ddp, self._workload.batch(self._rank + num_batch * dist.get_world_size()))

    def _step(self, ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss = self._loss(ddp)
        self._arrivals.append([])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        self._losses.append(float(loss.detach()))

    def _process(
        self,
        built: dict[str, torch.Tensor],
        wrapped: dict[str, torch.Tensor],
        end: dict[str, torch.Tensor],
        shown: _Shown,
    ) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "pid": str(os.getpid()),
            "host": socket.gethostname(),
            "threads": torch.get_num_threads(),
            "value_built": float(built[shown.name][shown.index]),
            "value_wrapped": float(wrapped[shown.name][shown.index]),
            "checksum_built": _checksum(built),
            "checksum_wrapped": _checksum(wrapped),
            "checksum_end": _checksum(end),
        }

    @contextmanager
    def _noting_arrivals(self, ddp: DistributedDataParallel) -> Iterator[None]:
        """Note when each gradient arrives, with hooks as any user may set them."""
        handles = []
        for name, parameter in ddp.module.named_parameters():
            if parameter.requires_grad:

                def note(_: torch.Tensor, name: str = name) -> None:
                    self._arrivals[-1].append((name, perf_counter()))

                handles.append(parameter.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _average(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, shown: _Shown) -> dict[str, Any]:
        """One pass with a look at what this rank contributes to it."""
        optimizer.zero_grad()
        local = self._local(shown, lambda: self._loss(ddp).backward())  # type: ignore[no-untyped-call]
        return {"rank": self._rank, "local": local, "result": shown.gradient()}

    def _no_sync(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, shown: _Shown) -> dict[str, Any]:
        optimizer.zero_grad()
        before = ddp.reducer.num_passes
        with ddp.no_sync():
            self._loss(ddp).backward()  # type: ignore[no-untyped-call]
        num_passes = ddp.reducer.num_passes - before
        first = shown.gradient()
        second = self._local(shown, lambda: self._loss(ddp, num_batch=1).backward())  # type: ignore[no-untyped-call]
        row = {"rank": self._rank, "first": first, "second": second, "result": shown.gradient()}
        return {"num_passes": num_passes, "row": row}

    def _unused(self) -> dict[str, Any]:
        """Two more parameters: one that rank 0 alone uses, and one that nobody does."""
        module = self._workload.build()
        device = next(module.parameters()).device
        lonely, spare = (nn.Parameter(torch.tensor(_ONE_VALUE, device=device)) for _ in range(2))
        module.register_parameter("only_on_rank_0", lonely)
        module.register_parameter("used_nowhere", spare)
        ddp = self._wrap(module)
        loss = self._loss(ddp)
        if self._rank == 0:
            loss = loss + lonely
        loss.backward()  # type: ignore[no-untyped-call]
        words = ddp.reducer.last_words
        assert words is not None
        used = dict(zip(ddp.reducer.names, words.used, strict=True))
        return {
            "lonely_used": int(used["only_on_rank_0"]),
            "spare_used": int(used["used_nowhere"]),
            "row": {
                "rank": self._rank,
                "lonely_local": _ONE_VALUE if self._rank == 0 else None,
                "lonely_result": _value(lonely.grad, ()),
                "spare_local": None,
                "spare_result": _value(spare.grad, ()),
            },
        }

    @staticmethod
    def _local(shown: _Shown, backward: Callable[[], Any]) -> float:
        """Run a backward and return what this rank alone found for one value."""
        pieces: list[float] = []

        def note(grad: torch.Tensor) -> None:
            pieces.append(float(grad[shown.index]))

        handle = shown.parameter.register_hook(note)  # type: ignore[no-untyped-call]
        backward()
        handle.remove()
        return sum(pieces)


def _workload(model: str) -> Workload:
    if model == "toy":
        return Workload("SimpleModel", SimpleModel, _samples, _square_loss, torch.optim.SGD, {"lr": 0.01})
    if model == "gpt":
        config = GPT2Config(num_layers=4, num_heads=4, width=128, context=64, vocab_size=257)
        return Workload("GPT", partial(GPT2, config), _tokens, _token_loss, torch.optim.AdamW, {"lr": 1e-3})
    return workload_of_factory(model)


def _device_type(module: nn.Module) -> str:
    return next((p.device.type for p in module.parameters()), "cpu")


def _samples(seed: int) -> torch.Tensor:
    return torch.randn(32, 10, generator=torch.Generator().manual_seed(seed))


def _tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(257, (4, 65), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _square_loss(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (module(inputs) - 1.0).square().mean()  # type: ignore[no-any-return]


def _token_loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = module(*batch)[1]
    return loss


def _small_cap(module: nn.Module) -> int:
    """Return a limit that gives a small model a few buckets."""
    return max(sum(p.numel() * p.element_size() for p in module.parameters()) // _NUM_PIECES, 1)


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu().clone() for name, p in module.named_parameters()}


def _checksum(state: dict[str, torch.Tensor]) -> str:
    digest = 0
    for tensor in state.values():
        digest = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), digest)
    return f"{digest:08x}"


def _shown_value(module: nn.Module) -> _Shown:
    """Return the value whose gradient is the largest in the first parameter; the same on all ranks."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.is_floating_point() and parameter.grad.numel():
            flat = int(parameter.grad.abs().argmax())
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), parameter.shape))
            return _Shown(name, parameter, index)
    raise AssertionError("a module that was trained has gradients")


def _place_of(ddp: DistributedDataParallel, name: str) -> dict[str, int]:
    for bucket in ddp.report().buckets:
        for place in bucket.parameters:
            if place.name == name:
                return {"bucket": bucket.number, "offset_bytes": place.offset_bytes}
    return {"bucket": -1, "offset_bytes": 0}


def _value(grad: torch.Tensor | None, index: tuple[int, ...]) -> float | None:
    return None if grad is None else float(grad[index])
