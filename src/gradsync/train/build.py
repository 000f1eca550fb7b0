"""What a rank builds by itself before a run: data, model, optimizer. No word to the other ranks, nothing written."""

import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from gradsync.data.corpus import Corpus, load_corpus
from gradsync.data.loader import GlobalBatchLoader
from gradsync.data.source import TokenSource
from gradsync.model.gpt2 import GPT2
from gradsync.train.batch import BatchPlan, micro_batch_limit, plan_batch
from gradsync.train.completions import Example, read_examples
from gradsync.train.config import TrainConfig
from gradsync.train.initial import initial_model
from gradsync.train.modes import compile_blocks
from gradsync.train.state import TrainingState

_FINGERPRINT_TOKENS = 1 << 16


@dataclass(frozen=True)
class Material:
    """The parts of a run on one rank, before ranks meet."""

    plan: BatchPlan
    corpus: Corpus
    loader: GlobalBatchLoader
    model: GPT2
    optimizer: torch.optim.Optimizer
    examples: list[Example]
    state: TrainingState


def build(config: TrainConfig, rank: int, world: int, device: torch.device) -> Material:
    """Build everything for one rank.

    Raises:
        ConfigError: options that cannot work together.
        DataError: the data is missing, damaged or too short.
    """
    limit = micro_batch_limit(config.max_micro_batch, config.context, device.type)
    plan = plan_batch(config.batch_tokens, config.context, world, config.micro_batch, limit)
    corpus = load_corpus(config.data, config.tokenizer, config.val_fraction)
    loader = _make_loader(config, plan, corpus.train, rank, world)
    examples = read_examples(Path(config.hellaswag)) if config.hellaswag else []
    model = initial_model(config, corpus.tokenizer).to(device)
    model.activation_checkpointing = config.activation_checkpointing
    if config.compile:
        compile_blocks(model.transformer.h)
    # The weights are the same on every rank, the dropout masks are not.
    torch.manual_seed(_dropout_seed(config.seed, rank))
    optimizer = model.configure_optimizers(
        weight_decay=config.weight_decay,
        learning_rate=config.lr,
        device_type=device.type,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    state = TrainingState(model, optimizer, rank, device)
    return Material(plan, corpus, loader, model, optimizer, examples, state)


def fingerprint(source: TokenSource) -> dict[str, int]:
    """Return what tells one training text from another: its length and a checksum of both ends of each shard."""
    checksum = 0
    for shard in source.shards:
        for end in (shard[:_FINGERPRINT_TOKENS], shard[-_FINGERPRINT_TOKENS:]):
            checksum = zlib.crc32(end.tobytes(), checksum)
    return {"tokens": source.num_tokens, "crc32": checksum}


def _make_loader(config: TrainConfig, plan: BatchPlan, source: TokenSource, rank: int, world: int) -> GlobalBatchLoader:
    return GlobalBatchLoader(
        source,
        sequences_per_step=plan.sequences_per_step,
        context=config.context,
        rank=rank,
        world=world,
        micro_batch=plan.micro_batch,
        shuffle=config.shuffle,
        seed=config.seed,
    )


def _dropout_seed(seed: int, rank: int) -> int:
    return seed * 1_000_003 + rank + 1
