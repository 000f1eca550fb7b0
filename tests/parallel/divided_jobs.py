"""A small GPT-2 trained as one rank does it under some layout, beside the same model on this rank alone."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradsync.model.gpt2 import GPT2, GPT2Config
from gradsync.parallel.apply import Wanted, parallelize
from gradsync.parallel.degrees import Degrees
from gradsync.parallel.division import Flow
from gradsync.parallel.pieces import assembled
from gradsync.parallel.replica import Replica

CPU = torch.device("cpu")
SEQUENCES, CONTEXT, STEPS = 12, 8, 3


@dataclass(frozen=True)
class Layout:
    degrees: Degrees
    strategy: Any = "ddp"
    schedule: Any = "1f1b"
    micro_batches: int = 2
    layers: int = 2
    frozen: tuple[str, ...] = ()
    checkpointing: bool = False
    cuts_sequences: bool = False

    @property
    def config(self) -> GPT2Config:
        return GPT2Config(num_layers=self.layers, num_heads=6, width=24, context=CONTEXT, vocab_size=101)


def make_model(layout: Layout) -> GPT2:
    torch.manual_seed(1)
    model = GPT2(layout.config, activation_checkpointing=layout.checkpointing)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(layout.frozen) if layout.frozen else True)
    return model


def tokens(layout: Layout, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(layout.config.vocab_size, (SEQUENCES, CONTEXT + 1), generator=generator)


def optimizer_of(tensors: list[Tensor]) -> torch.optim.Optimizer:
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.requires_grad:
            groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-2, eps=1e-4)


def divided(layout: Layout) -> Replica:
    per_rank = SEQUENCES // layout.degrees.data
    micro_batch = per_rank // layout.micro_batches
    flow = Flow(layout.schedule, layout.micro_batches, micro_batch, CONTEXT, layout.cuts_sequences)
    wanted = Wanted(layout.strategy, layout.degrees, flow)
    model = make_model(layout)
    return parallelize(model, wanted, CPU)


def own_micro_batches(layout: Layout, replica: Replica, step: int) -> list[tuple[Tensor, Tensor]]:
    own = tokens(layout, step)[replica.data_rank :: layout.degrees.data]
    return [(part[:, :-1], part[:, 1:]) for part in own.chunk(layout.micro_batches)]


def train(layout: Layout, replica: Replica, limit: float = 0.5) -> list[tuple[float, float]]:
    """Losses and gradient norms of a few steps, after each of which replicas are the same."""
    optimizer = optimizer_of([held.tensor for held in replica.held.values()])
    found = []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        micro_batches = own_micro_batches(layout, replica, step)
        replica.forward_backward(micro_batches, SEQUENCES * CONTEXT, total.add_)
        norm = replica.clip_gradients(limit)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        found.append((float(total) / SEQUENCES / CONTEXT, norm))
        replicas_are_equal(replica)
    return found


def replicas_are_equal(replica):
    """Whatever two ranks both hold is equal bit for bit: replicas, norms under tensor parallel, both ends' table."""
    own = {name: (held.cut, held.tensor.detach()) for name, held in replica.held.items()}
    own = {
        name: (cut, tensor.to_local() if hasattr(tensor, "to_local") else tensor) for name, (cut, tensor) in own.items()
    }
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    for name, (cut, tensor) in own.items():
        for other in everyone:
            if name in other and other[name][0] == cut:
                assert torch.equal(other[name][1], tensor), name


def train_alone(layout: Layout, limit: float = 0.5) -> tuple[GPT2, list[tuple[float, float]]]:
    model = make_model(layout)
    optimizer = optimizer_of(list(model.parameters()))
    found = []
    for step in range(STEPS):
        batch = tokens(layout, step)
        loss = model(batch[:, :-1], batch[:, 1:])[1]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return model, found


def gathered(replica: Replica) -> dict[str, Tensor]:
    """Every parameter, whole, from what all ranks hold."""
    own = {name: held.cut.of(held.tensor) for name, held in replica.held.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    names = {name for part in everyone for name in part}
    return {name: assembled([part[name] for part in everyone if name in part]) for name in names}
