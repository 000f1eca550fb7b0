"""What a run would be, computed without training: parameters, memory of a rank, batch arithmetic, files.

The model is built from fake tensors, which have shapes and no memory, and one forward pass over them
tells what backward would keep. So the figures follow the model and the options by themselves.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gradsync.data.corpus import Corpus, load_corpus
from gradsync.data.evaluation import check_evaluable
from gradsync.data.tokenizer import Tokenizer
from gradsync.model.gpt2 import GPT2
from gradsync.model.layout import GPT2_LAYOUT
from gradsync.observe.metrics import has_tensorboard
from gradsync.parallel.degrees import Degrees
from gradsync.parallel.division import num_stages
from gradsync.parallel.stage import split_blocks
from gradsync.train.activations import Activations, kept_by
from gradsync.train.batch import BatchPlan
from gradsync.train.build import make_loader
from gradsync.train.config import TrainConfig
from gradsync.train.modes import Modes
from gradsync.train.outline import check_options, in_words

_MIB = 2**20
_MOMENTS = 2


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by what holds them."""

    parameters: int
    gradients: int
    buckets: int
    moments: int
    activations: int
    checkpoint_copy: int

    @property
    def total(self) -> int:
        """All of them; the process itself and passing temporaries come on top."""
        return sum(vars(self).values())


def dry_run(config: TrainConfig, world: int, device_type: str) -> list[str]:
    """Return lines that describe the run.

    Raises:
        GradsyncError: the run would be refused.
    """
    device = torch.device(device_type)
    outlined = check_options(config, world, device_type)
    degrees, plan = outlined.degrees, outlined.plan
    corpus = load_corpus(config.data, config.tokenizer, config.val_fraction)
    make_loader(config, plan, corpus.train, 0, degrees.data)  # these refuse a text that is too short
    check_evaluable(corpus.val, config.context)
    with FakeTensorMode(), device:
        model = GPT2(outlined.shape)
        model.activation_checkpointing = config.activation_checkpointing
        activations = _kept(model, plan, Modes(config.dtype, device, is_compiled=False), device)
    memory = _memory(model, activations, degrees, config)
    return [
        *_model_lines(model),
        *_layout_lines(config, degrees),
        *_batch_lines(config, plan, corpus, degrees.data),
        *_memory_lines(memory, device),
        *_file_lines(config, model, corpus.tokenizer, world),
    ]


def _kept(model: nn.Module, plan: BatchPlan, modes: Modes, device: torch.device) -> Activations:
    """Return what one micro-batch's forward pass keeps for backward."""
    tokens = torch.zeros(plan.micro_batch, plan.context, dtype=torch.int64, device=device)
    with modes.training():
        return kept_by(model, GPT2_LAYOUT, lambda: model(tokens, tokens, reduction="sum"))


def _memory(model: GPT2, activations: Activations, degrees: Degrees, config: TrainConfig) -> Memory:
    """Return what the rank with the largest stage needs; its activations are those of all blocks."""
    parameters = max(_stage_bytes(model, degrees, blocks) for blocks in _blocks_of_ranks(model, degrees, config))
    of_all, of_moments = (1, 1) if config.strategy == "ddp" else (1, degrees.data)
    if config.strategy == "fsdp":
        of_all = degrees.data
    has_buckets = degrees.data > 1 and config.strategy == "ddp"
    state = parameters * (1 + _MOMENTS)
    return Memory(
        parameters=parameters // of_all,
        gradients=parameters // of_moments,
        buckets=parameters if has_buckets else 0,
        moments=parameters * _MOMENTS // of_moments,
        activations=activations.on_rank(degrees.tensor, config.sequence_parallel),
        checkpoint_copy=state // degrees.data if config.async_checkpoints else 0,
    )


def _blocks_of_ranks(model: GPT2, degrees: Degrees, config: TrainConfig) -> list[set[int]]:
    total = num_stages(config.schedule, degrees.pipeline) if degrees.pipeline > 1 else 1
    parts = split_blocks(model.config.num_layers, total)
    return [
        {block for stage in range(rank, total, degrees.pipeline) for block in parts[stage]}
        for rank in range(degrees.pipeline)
    ]


def _stage_bytes(model: GPT2, degrees: Degrees, blocks: set[int]) -> int:
    """Return the bytes of some blocks and what stands before or after them, cut by the tensor degree."""
    layout, num_layers = GPT2_LAYOUT, model.config.num_layers
    cut = (*layout.columns, *layout.rows, layout.tied[1].removesuffix(".weight"))
    has_table = 0 in blocks or num_layers - 1 in blocks
    total = 0
    for name, parameter in model.named_parameters():
        inside = name.removeprefix(f"{layout.blocks}.")
        is_here = int(inside.split(".")[0]) in blocks if inside != name else has_table
        if is_here:
            total += parameter.nbytes // (degrees.tensor if any(part in name for part in cut) else 1)
    return total


def _model_lines(model: GPT2) -> list[str]:
    shape = model.config
    padding = (shape.padded_vocab_size - shape.vocab_size) * shape.width
    return [
        f"model       {shape.num_layers} layers, {shape.num_heads} heads, width {shape.width}, "
        f"context {shape.context}, vocabulary {shape.vocab_size:,} padded to {shape.padded_vocab_size:,}",
        f"parameters  {model.num_parameters():,}, and {padding:,} of padding",
    ]


def _layout_lines(config: TrainConfig, degrees: Degrees) -> list[str]:
    return [
        f"layout      {degrees.world} process(es): {config.strategy}, {in_words(degrees, config.sequence_parallel)}"
    ]


def _batch_lines(config: TrainConfig, plan: BatchPlan, corpus: Corpus, replicas: int) -> list[str]:
    tokens = config.steps * plan.tokens_per_step
    return [
        f"step        {plan.tokens_per_step:,} tokens = {plan.sequences_per_step:,} sequences = "
        f"{replicas} replica(s) x {plan.accumulation} micro-batch(es) x {plan.micro_batch} sequences x "
        f"{plan.context} tokens",
        f"data        {corpus.name}: {corpus.train.num_tokens:,} tokens to train, {corpus.val.num_tokens:,} held back",
        f"run         {config.steps:,} steps = {tokens:,} tokens = {tokens / corpus.train.num_tokens:.2f} epochs",
    ]


def _memory_lines(memory: Memory, device: torch.device) -> list[str]:
    lines = [f"memory      about {memory.total / _MIB:,.0f} MiB a rank ({device.type}), beside the process itself"]
    for name, held in vars(memory).items():
        lines.append(f"  {name.replace('_', ' '):<18}{held / _MIB:>10,.1f} MiB")
    return lines


def _file_lines(config: TrainConfig, model: nn.Module, tokenizer: Tokenizer, world: int) -> list[str]:
    size = sum(parameter.nbytes for parameter in model.parameters()) * (1 + _MOMENTS) / _MIB  # whatever the layout
    count = 1 if config.checkpoint_every == 0 else config.keep_checkpoints + 1
    names = ["config.yaml", "metrics.jsonl", "starts.jsonl", "samples/", "checkpoints/"]
    names += ["tokenizer.json"] if hasattr(tokenizer, "path") else []
    names += ["trace.json", "timeline.json"] if config.trace and world > 1 else []
    names += ["tensorboard/"] if config.tensorboard and has_tensorboard() else []
    return [
        f"writes      {config.run}: {', '.join(names)}",
        f"            checkpoints of {size:,.1f} MiB, up to {count} at a time",
    ]
