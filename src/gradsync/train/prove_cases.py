"""What ``gradsync prove`` runs: the rows of its table, and the two kinds of models it runs them on.

A *subject* gives, for a row, what one rank trains, and its part of each step's batch. The batch is the same for all
rows; how it is cut is the row's.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradsync.ddp.module import DistributedDataParallel
from gradsync.errors import ConfigError
from gradsync.model.factory import Factory, load_factory
from gradsync.model.gpt2 import GPT2, GPT2Config
from gradsync.model.layout import GPT2_LAYOUT
from gradsync.parallel.apply import Wanted, parallelize
from gradsync.parallel.degrees import Degrees, PipelineSchedule, Strategy
from gradsync.parallel.division import Flow
from gradsync.parallel.fsdp import shard_parameters, without_reduction
from gradsync.parallel.held import Held, clip_global_norm, held_in_mesh, held_whole, tensor_dims
from gradsync.parallel.mesh import Mesh

SEQUENCES = 16
"""Rows of the batch of one step, for up to four ranks; every case divides it evenly."""
MICRO_BATCHES = 4
_SCHEDULES: dict[str, PipelineSchedule] = {"GPipe": "gpipe", "1F1B": "1f1b", "interleaved 1F1B": "interleaved"}
_SHAPE = GPT2Config(num_layers=4, num_heads=4, width=32, context=32, vocab_size=257)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    degrees: Degrees = Degrees()
    strategy: Strategy = "ddp"
    schedule: PipelineSchedule = "1f1b"
    micro_batches: int = 1
    syncs_late: bool = False
    """Whether every backward runs under ``no_sync()`` and the gradients are synchronised after the last one."""
    cuts_sequences: bool = False
    backend: str = "gloo"

    @property
    def world(self) -> int:
        """Processes it takes."""
        return self.degrees.world

    @property
    def needs_layout(self) -> bool:
        """Whether it works only on a model whose layout is known."""
        return self.degrees.tensor * self.degrees.pipeline > 1


def sequences_for(world: int) -> int:
    """Return the rows of the batch of one step that all cases of so many ranks divide evenly."""
    return math.lcm(SEQUENCES, world * MICRO_BATCHES)


def joint_cases(world: int, backend: str) -> list[Case]:
    """Return the rows that take all of so many ranks, which a launcher has started, perhaps on several hosts."""
    rows = [Case("one process")] if world == 1 else _rows_on(world)
    return [_with_backend(row, backend) for row in rows]


def _rows_on(world: int) -> list[Case]:
    rows = [
        Case("DDP", Degrees(world)),
        Case("DDP, accumulation", Degrees(world), micro_batches=MICRO_BATCHES),
        Case("DDP, no_sync, then sync_gradients", Degrees(world), micro_batches=MICRO_BATCHES, syncs_late=True),
        Case("ZeRO", Degrees(world), "zero", micro_batches=2),
        Case("FSDP", Degrees(world), "fsdp", micro_batches=2),
    ]
    half, quarter = world // 2, world // 4
    around = "DDP x " if half > 1 else ""
    if world % 2 == 0:
        rows += [
            Case(f"{around}tensor", Degrees(half, 2)),
            Case(f"{around}tensor, sequence", Degrees(half, 2), cuts_sequences=True),
            *(
                Case(f"{around}pipeline, {name}", Degrees(half, 1, 2), schedule=schedule, micro_batches=MICRO_BATCHES)
                for name, schedule in _SCHEDULES.items()
            ),
        ]
    if world % 2 == 0 and half > 1:
        rows.append(Case("FSDP x tensor", Degrees(half, 2), "fsdp"))
        rows.append(Case("FSDP x tensor, sequence", Degrees(half, 2), "fsdp", cuts_sequences=True))
        rows.append(Case("FSDP x pipeline", Degrees(half, 1, 2), "fsdp", micro_batches=MICRO_BATCHES))
    if world % 4 == 0:
        around = "DDP x " if quarter > 1 else ""
        rows.append(Case(f"{around}tensor x pipeline", Degrees(quarter, 2, 2), micro_batches=MICRO_BATCHES))
    return rows


def cases(backend: str, others: Sequence[str]) -> list[Case]:
    """Return all rows, for a main backend and the other ones that are there."""
    rows = [
        Case("one process"),
        Case("one process, accumulation", micro_batches=MICRO_BATCHES),
        Case("DDP on 2", Degrees(2)),
        Case("DDP on 4", Degrees(4)),
        Case("DDP, accumulation", Degrees(2), micro_batches=MICRO_BATCHES),
        Case("DDP, no_sync, then sync_gradients", Degrees(2), micro_batches=MICRO_BATCHES, syncs_late=True),
        Case("ZeRO", Degrees(2), "zero", micro_batches=2),
        Case("FSDP", Degrees(2), "fsdp", micro_batches=2),
        Case("tensor parallel", Degrees(1, 2), micro_batches=2),
        Case("tensor and sequence parallel", Degrees(1, 2), micro_batches=2, cuts_sequences=True),
        *(
            Case(f"pipeline, {name}", Degrees(1, 1, 2), schedule=schedule, micro_batches=MICRO_BATCHES)
            for name, schedule in _SCHEDULES.items()
        ),
        Case("DDP x tensor", Degrees(2, 2)),
        Case("DDP x tensor, sequence", Degrees(2, 2), cuts_sequences=True),
        Case("DDP x pipeline", Degrees(2, 1, 2), micro_batches=MICRO_BATCHES),
        Case("FSDP x tensor", Degrees(2, 2), "fsdp"),
        Case("FSDP x tensor, sequence", Degrees(2, 2), "fsdp", cuts_sequences=True),
        Case("FSDP x pipeline", Degrees(2, 1, 2), "fsdp", micro_batches=MICRO_BATCHES),
        Case("tensor x pipeline", Degrees(1, 2, 2), micro_batches=MICRO_BATCHES),
        Case("tensor, sequence x pipeline", Degrees(1, 2, 2), micro_batches=MICRO_BATCHES, cuts_sequences=True),
    ]
    rows = [_with_backend(row, backend) for row in rows]
    for other in others:
        rows.append(Case(f"DDP on 2, {other}", Degrees(2), backend=other))
        rows.append(Case(f"DDP x tensor, {other}", Degrees(2, 2), backend=other))
    return rows


class Trainee(Protocol):
    """What one rank trains; ``parallel.replica.Replica`` is one."""

    held: dict[str, Held]
    ddp: DistributedDataParallel | None
    data_rank: int
    data_world: int

    def forward_backward(self, micro_batches: Any, divisor: int, on_loss: Callable[[Tensor], None]) -> None:
        """Add up the gradients of the parts' losses over ``divisor``."""

    def clip_gradients(self, limit: float) -> float:
        """Scale the gradients and return their norm before."""


class Subject(Protocol):
    """A model to prove something about."""

    divisor: int
    """What summed losses of one step are divided by."""

    def trainee(self, case: Case, device: torch.device) -> Trainee:
        """Return what this rank trains."""

    def parts(self, step: int, case: Case, data_rank: int, device: torch.device) -> list[Any]:
        """Return this rank's micro-batches."""

    def reference(self) -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
        """Return a plain module and a function of it and a step that returns the step's mean loss."""


class GPTSubject:
    """A small GPT-2 on random tokens."""

    def __init__(self, sequences: int = SEQUENCES) -> None:
        self._sequences = sequences
        self.divisor = sequences * _SHAPE.context

    def trainee(self, case: Case, device: torch.device) -> Trainee:
        """Divide the model as the row says."""
        model = _seeded_gpt()
        per_rank = self._sequences // case.degrees.data
        micro_batch = per_rank // case.micro_batches
        flow = Flow(case.schedule, case.micro_batches, micro_batch, _SHAPE.context, case.cuts_sequences)
        wanted = Wanted(case.strategy, case.degrees, flow)
        return parallelize(model, wanted, device)

    def parts(self, step: int, case: Case, data_rank: int, device: torch.device) -> list[Any]:
        """Cut the step's tokens."""
        own = self._tokens(step).to(device)[data_rank :: case.degrees.data]
        return [(part[:, :-1], part[:, 1:]) for part in own.chunk(case.micro_batches)]

    def reference(self) -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
        """Return the bare model."""
        return _seeded_gpt(), self._mean_loss

    def _tokens(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randint(_SHAPE.vocab_size, (self._sequences, _SHAPE.context + 1), generator=generator)

    def _mean_loss(self, module: nn.Module, step: int) -> Tensor:
        tokens = self._tokens(step).to(next(module.parameters()).device)
        loss: Tensor = module(tokens[:, :-1], tokens[:, 1:])[1]
        return loss


class UserSubject:
    """The user's own model; its loss must be a mean over the rows of the batch, as data parallelism asks of any."""

    divisor = 1

    def __init__(self, path: str, sequences: int = SEQUENCES) -> None:
        self._factory = load_factory(path)
        leaves = tree_flatten(self._factory.batch)[0]
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            raise ConfigError(f"--model {path}: the batch holds no tensor, so there are no rows to divide among ranks")
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] % sequences):
                raise ConfigError(
                    f"--model {path}: a tensor of the batch has shape {tuple(leaf.shape)}; its first dimension is "
                    f"divided among ranks and micro-batches, and must be a multiple of {sequences}"
                )

    def trainee(self, case: Case, device: torch.device) -> Trainee:
        """Wrap the model as the row says."""
        return _UserModel(self._factory, case, device)

    def parts(self, step: int, case: Case, data_rank: int, device: torch.device) -> list[Any]:
        """Cut the batch, another one in each step: its rows turn."""
        total = case.degrees.data * case.micro_batches
        whole = _turned(self._factory.batch, step)
        return [_chunk(whole, total, data_rank * case.micro_batches + i, device) for i in range(case.micro_batches)]

    def reference(self) -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
        """Return the bare model."""
        factory = self._factory
        return factory.build(), lambda module, step: factory.loss(module, _turned(factory.batch, step))


class _UserModel:
    """DDP, ZeRO or FSDP around a module of which nothing is known."""

    def __init__(self, factory: Factory, case: Case, device: torch.device) -> None:
        self._case = case
        self._loss = factory.loss
        self._module = factory.build().to(device)
        self._device = device
        self._without_reduction: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._wrapped = self._module
        self.data_rank, self.data_world = 0, case.degrees.data
        self.ddp: DistributedDataParallel | None = None
        self.held = held_whole(self._module)
        if case.strategy == "fsdp":
            self._shard()
        elif case.world > 1:
            self.ddp = self._wrapped = DistributedDataParallel(self._module, reduction="sum")
            self.data_rank, self._without_reduction = self.ddp.reducer.rank, self.ddp.no_sync

    def forward_backward(self, micro_batches: Any, divisor: int, on_loss: Callable[[Tensor], None]) -> None:
        """As ``Replica``; the loss of a part is a mean, so its share of the step's is taken."""
        share = 1.0 / (self.data_world * len(micro_batches))
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, part in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            with ExitStack() as stack:
                if not is_last:
                    stack.enter_context(self._without_reduction())
                loss: Any = self._loss(self._wrapped, part) * (share / divisor)
                total += loss.detach()
                if is_last:
                    on_loss(total * divisor)
                loss.backward()

    def clip_gradients(self, limit: float) -> float:
        """As ``Replica``."""
        if self._case.strategy == "fsdp":
            return clip_global_norm(self.held.values(), limit, self._device)
        return float(nn.utils.clip_grad_norm_(self._module.parameters(), limit))

    def _shard(self) -> None:
        mesh = Mesh(self._case.degrees, self._device)
        dims = tensor_dims(self._module)
        shard_parameters(self._module, [], mesh.data)
        self.held = held_in_mesh(self._module, dims, GPT2_LAYOUT, mesh, is_fully_sharded=True)
        self.data_rank, self._without_reduction = mesh.data_rank, partial(without_reduction, self._module)


def _with_backend(case: Case, backend: str) -> Case:
    return Case(**{**vars(case), "backend": backend})


def _seeded_gpt() -> GPT2:
    torch.manual_seed(0)
    return GPT2(_SHAPE)


def _turned(batch: Any, step: int) -> Any:
    return _on_tensors(batch, lambda tensor: tensor.roll(step, dims=0))


def _chunk(batch: Any, count: int, index: int, device: torch.device) -> Any:
    return _on_tensors(batch, lambda tensor: tensor.chunk(count)[index].to(device))


def _on_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    leaves, form = tree_flatten(batch)
    return tree_unflatten([change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)
