"""The one place where parallelisms are put on a model, and the order in which that happens.

1. *Pipeline split*: every rank keeps the blocks of its stages; the rest is dropped before it takes device memory.
2. *Tensor parallel*: the matrices of what is left are cut, and sequences between them if that is wanted.
3. *Activation checkpointing*: block by block (the stages do it as the model says), so it sees whole blocks.
4. *Compile*: block by block, with the collectives of the tensor parallel inside.
5. *FSDP or DDP* over the data axis, last: they hook onto parameters, which must be the final ones.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from gradsync.ddp.module import DistributedDataParallel
from gradsync.model.gpt2 import GPT2
from gradsync.model.layout import GPT2_LAYOUT
from gradsync.parallel.degrees import Degrees, Strategy
from gradsync.parallel.division import Flow, check_division, num_stages
from gradsync.parallel.fsdp import shard_parameters, without_reduction
from gradsync.parallel.held import Held, held_in_mesh, held_whole, tensor_dims
from gradsync.parallel.mesh import Mesh
from gradsync.parallel.pipeline import Pipelined
from gradsync.parallel.replica import Context, Replica, Shared, Whole
from gradsync.parallel.stage import Stage, split_blocks
from gradsync.parallel.tensor import CutVocabulary, cut_tensors
from gradsync.parallel.vocabulary import Vocabulary, WholeVocabulary


@dataclass(frozen=True)
class Wanted:
    """What is to be made of a model.

    ``compile_block`` is called for every block, ``training`` is the context of a training step's forward.
    """

    strategy: Strategy
    degrees: Degrees
    flow: Flow
    compile_block: Callable[[nn.Module], None] | None = None
    training: Context = nullcontext
    check_replicas_every: int | None = None
    """As of ``DistributedDataParallel``."""


def parallelize(model: GPT2, wanted: Wanted, device: torch.device) -> Replica:
    """Return the model as this rank trains it; collective unless there is one rank alone. Takes the model over.

    The model must be the same on all ranks.

    Raises:
        ConfigError: it cannot be divided in this way; on all ranks alike.
    """
    degrees = wanted.degrees
    check_division(model.config, wanted.strategy, degrees, wanted.flow)
    if degrees.world == 1:
        return _alone(model.to(device), wanted)
    if degrees.tensor * degrees.pipeline > 1 or wanted.strategy == "fsdp":
        return _divided(model, wanted, Mesh(degrees, device))
    return _replicated(model.to(device), wanted)


def _alone(model: GPT2, wanted: Wanted) -> Whole:
    _compile(list(model.transformer.h), wanted)
    return Whole(model, held_whole(model), wanted.training)


def _replicated(model: GPT2, wanted: Wanted) -> Replica:
    """DDP over all ranks; ZeRO is the same model with another optimizer."""
    replica = _alone(model, wanted)
    wrapped = DistributedDataParallel(model, reduction="sum", check_replicas_every=wanted.check_replicas_every)
    replica.data_rank, replica.data_world = wrapped.reducer.rank, wrapped.reducer.world_size
    replica.ddp = wrapped
    return replica.wrapped_in(wrapped, wrapped.no_sync)


def _divided(model: GPT2, wanted: Wanted, mesh: Mesh) -> Replica:
    """FSDP, tensor or pipeline parallel, or several of them, and data parallel around them."""
    degrees = wanted.degrees
    stages = _own_stages(model, wanted, mesh)
    vocabulary: Vocabulary = WholeVocabulary(model.config.vocab_size)
    if degrees.tensor > 1:
        for stage in stages:
            cut_tensors(stage, GPT2_LAYOUT, mesh.tensor, wanted.flow.cuts_sequences)
        vocabulary = CutVocabulary(mesh.tensor, model.config.vocab_size, model.config.padded_vocab_size)
    for stage in stages:
        _compile(stage.blocks, wanted)
    held: dict[str, Held] = {}
    runnable: list[nn.Module] = []
    is_fully_sharded = wanted.strategy == "fsdp" and degrees.data > 1
    for stage in stages:
        dims = tensor_dims(stage)
        if is_fully_sharded:
            shard_parameters(stage, stage.blocks, mesh.data)
        held.update(held_in_mesh(stage, dims, GPT2_LAYOUT, mesh, is_fully_sharded))
        is_replicated = degrees.data > 1 and not is_fully_sharded
        runnable.append(_data_parallel(stage, mesh, wanted) if is_replicated else stage)
    if degrees.pipeline > 1:
        return Pipelined(stages, runnable, held, mesh, vocabulary, wanted.flow)
    replica = Shared(stages[0], held, mesh, vocabulary, wanted.flow)
    if is_fully_sharded:
        return replica.wrapped_in(runnable[0], partial(without_reduction, runnable[0]))
    if isinstance(runnable[0], DistributedDataParallel):
        replica.engines = [runnable[0]]
        return replica.wrapped_in(runnable[0], runnable[0].no_sync)
    return replica


def _own_stages(model: GPT2, wanted: Wanted, mesh: Mesh) -> list[Stage]:
    degree = mesh.degrees.pipeline
    total = num_stages(wanted.flow.schedule, degree) if degree > 1 else 1
    parts = split_blocks(model.config.num_layers, total)
    own = range(mesh.pipeline_rank, total, degree)
    return [Stage(model, parts[index], wanted.training).to(mesh.device) for index in own]


def _data_parallel(module: nn.Module, mesh: Mesh, wanted: Wanted) -> DistributedDataParallel:
    every = wanted.check_replicas_every
    return DistributedDataParallel(
        module, process_group=mesh.data.get_group(), reduction="sum", check_replicas_every=every
    )


def _compile(blocks: list[nn.Module], wanted: Wanted) -> None:
    for block in blocks if wanted.compile_block else ():
        assert wanted.compile_block is not None
        wanted.compile_block(block)
