"""Tensor parallelism: matrices cut among ranks that see the same data, by torch's ``parallelize_module``.

Embedding and head are cut by rows of the vocabulary, so the logits are, too: the loss is taken without gathering them
(torch's ``loss_parallel``). Activations between projections are whole and equal on all ranks, and so are the gradients
of what is not cut (norms, positions), without a word; or sequences are cut there as well.

[Note: Cut sequences] Every rank has the tokens of its slice: (B, S, C). A branch begins with a gather along the
sequence and its rows end in a reduce-scatter along it, where an all-reduce is otherwise: the same traffic, with an N-th
of the memory and of the work between. What each parameter's gradient is then:

- of a norm, the sum over this rank's tokens: ``_as_cut`` adds up the ranks', in each backward and before anything sees
  the gradient (under FSDP, which puts parameters of its own in the place of these, FSDP does it);
- of a row projection's bias and of the positions, whole and equal on all ranks: the gradient of what they have put out
  is gathered first;
- of a matrix, as without.

Shapes: B sequences, T tokens, S tokens of a slice, V vocabulary (padded), W rows of it on this rank, C channels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from gradsync.model.gpt2 import IGNORED_TARGET
from gradsync.model.layout import Layout
from gradsync.parallel.pieces import chunk_of

_SEQUENCE = Shard(1)


def cut_tensors(module: nn.Module, layout: Layout, mesh: DeviceMesh, cuts_sequences: bool = False) -> None:
    """Cut the matrices of a model, or of a stage of it, in place; collective.

    ``cuts_sequences``: what is between them too, see [Note: Cut sequences]; the ranks must then divide each sequence.
    """
    parts = dict(module.named_modules())
    is_trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    for name, part in parts.items():
        if name.startswith(f"{layout.blocks}.") and name.count(".") == layout.blocks.count(".") + 1:
            _order_by_ranks(part, layout, mesh.size())
            parallelize_module(part, mesh, _block_plan(layout, cuts_sequences))
    plan = _plan_of_ends(layout, cuts_sequences)
    parallelize_module(module, mesh, {name: style for name, style in plan.items() if name in parts})
    head, embedding = (name.removesuffix(".weight") for name in layout.tied)
    if embedding in parts and head in parts:
        parts[head].weight = parts[embedding].weight
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_trained[name])  # older styles forget it
        if parameter.requires_grad and isinstance(parameter, DTensor):
            parameter.register_hook(partial(_as_cut, parameter))  # type: ignore[no-untyped-call]


def tensor_dim(parameter: Tensor) -> int | None:
    """Return the dimension along which a parameter is cut, None if it is whole on every rank."""
    if not isinstance(parameter, DTensor):
        return None
    (placement,) = parameter.placements
    return placement.dim if isinstance(placement, Shard) else None


@dataclass(frozen=True)
class CutVocabulary:
    """The logits' columns that this rank has, and what can be known from them together with the other ranks."""

    mesh: DeviceMesh
    size: int
    padded_size: int

    @property
    def own(self) -> range:
        """The rows of the vocabulary on this rank."""
        return chunk_of(self.padded_size, self.mesh.size(), self.mesh.get_local_rank())

    def summed_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over all targets (B, T), from this rank's logits (B, T, W).

        To be called, and run backward through, inside ``losses``.
        """
        columns = torch.arange(self.own.start, self.own.stop, device=logits.device)
        # rows of padding stand for no token
        real = logits.float().masked_fill(columns >= self.size, float("-inf")).flatten(0, 1)
        whole = DTensor.from_local(
            real,
            self.mesh,
            [Shard(1)],
            run_check=False,
            shape=torch.Size((real.shape[0], self.padded_size)),
            stride=(self.padded_size, 1),
        )
        loss = F.cross_entropy(whole, targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
        assert isinstance(loss, DTensor)
        return loss.to_local()

    @contextmanager
    def losses(self) -> Iterator[None]:
        """For taking losses and running their backward; not to be nested."""
        with loss_parallel():
            yield

    def gathered(self, logits: Tensor) -> Tensor:
        """Return the logits of all real tokens (..., size) from every rank's own; collective, without gradients."""
        widest = len(chunk_of(self.padded_size, self.mesh.size(), 0))
        padded = F.pad(logits.detach(), (0, widest - logits.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.mesh.size())]
        dist.all_gather(parts, padded, group=self.mesh.get_group())
        return torch.cat(parts, dim=-1)[..., : self.size].contiguous()


def _block_plan(layout: Layout, cuts_sequences: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in layout.columns}
    between = _SEQUENCE if cuts_sequences else Replicate()
    plan.update({name: RowwiseParallel(output_layouts=between) for name in layout.rows})
    if cuts_sequences:
        plan.update({name: SequenceParallel() for name in layout.norms})
        # As DTensors, so that a branch sees the whole shape and its input's gradient is reduced and scattered at once.
        gather = PrepareModuleInput(input_layouts=_SEQUENCE, desired_input_layouts=Replicate())
        plan.update(dict.fromkeys(layout.branches, gather))
    return plan


def _plan_of_ends(layout: Layout, cuts_sequences: bool) -> dict[str, ParallelStyle]:
    """Return the plan for what is before and after the blocks."""
    head, embedding = (name.removesuffix(".weight") for name in layout.tied)
    between = _SEQUENCE if cuts_sequences else Replicate()
    plan: dict[str, ParallelStyle] = {
        embedding: RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        # use_local_output: the logits' own columns, as a plain tensor
        head: ColwiseParallel(input_layouts=between, output_layouts=Shard(-1)),
    }
    if cuts_sequences:
        plan[layout.last_norm] = SequenceParallel()
        plan[layout.positions] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    return plan


@torch.no_grad()
def _order_by_ranks(block: nn.Module, layout: Layout, shares: int) -> None:
    """Put what one rank is to have of several stacked matrices side by side; ``pieces`` knows the way back."""
    for name, stacked in layout.columns.items():
        if stacked > 1:
            for parameter in block.get_submodule(name).parameters():
                by_matrix = parameter.view(stacked, shares, -1, *parameter.shape[1:])
                parameter.copy_(by_matrix.transpose(0, 1).reshape(parameter.shape))


def _as_cut(parameter: DTensor, grad: Tensor) -> Tensor:
    """Cut a gradient as its parameter is: that of an embedding or a norm can come as a sum still to be taken."""
    assert isinstance(grad, DTensor)
    return grad if grad.placements == parameter.placements else grad.redistribute(placements=parameter.placements)
