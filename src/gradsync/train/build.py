"""What a rank builds by itself before a run: data and model; and the one look at whether the ranks built alike.

Nothing is written. How the model is spread over the ranks, and what comes after that, is in ``assemble``.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from gradsync.data.corpus import Corpus, load_corpus
from gradsync.data.evaluation import check_evaluable
from gradsync.data.loader import GlobalBatchLoader, check_assignments
from gradsync.data.source import TokenSource
from gradsync.errors import DataError
from gradsync.model.gpt2 import GPT2, GPT2Config
from gradsync.parallel.apply import Wanted
from gradsync.train.batch import BatchPlan
from gradsync.train.completions import Example, read_examples
from gradsync.train.config import TrainConfig
from gradsync.train.initial import initial_model
from gradsync.train.modes import Modes, compile_block
from gradsync.train.outline import outline, shape_of
from gradsync.train.ranks import Ranks

_FINGERPRINT_TOKENS = 1 << 16


@dataclass(frozen=True)
class Material:
    """The parts of a run on one rank, before ranks meet; ``model`` is whole and on the CPU, and gone once divided."""

    plan: BatchPlan
    corpus: Corpus
    loader: GlobalBatchLoader
    model: GPT2 | None
    shape: GPT2Config
    wanted: Wanted
    examples: list[Example]
    num_parameters: int
    flops_per_token: int


def build(config: TrainConfig, rank: int, world: int, device: torch.device, modes: Modes) -> Material:
    """Build everything for one rank.

    Raises:
        ConfigError: options that cannot work together.
        DataError: the data is missing, damaged or too short.
    """
    corpus = load_corpus(config.data, config.tokenizer, config.val_fraction)
    outlined = outline(config, world, device.type, shape_of(config, corpus.tokenizer))
    degrees, plan = outlined.degrees, outlined.plan
    loader = make_loader(config, plan, corpus.train, degrees.data_rank(rank), degrees.data)
    check_evaluable(corpus.val, config.context)
    examples = read_examples(Path(config.hellaswag)) if config.hellaswag else []
    model = initial_model(config, corpus.tokenizer)
    model.activation_checkpointing = config.activation_checkpointing
    compiled = compile_block if config.compile else None
    wanted = Wanted(config.strategy, degrees, outlined.flow, compiled, modes.training, config.check_replicas_every)
    counts = model.num_parameters(), model.estimate_flops_per_token()
    return Material(plan, corpus, loader, model, model.config, wanted, examples, *counts)


def make_loader(config: TrainConfig, plan: BatchPlan, source: TokenSource, rank: int, world: int) -> GlobalBatchLoader:
    """Return one replica's share of the training text.

    Raises:
        DataError: the text is shorter than one step.
    """
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


def fingerprint(source: TokenSource) -> dict[str, int]:
    """Return what tells one training text from another: its length and a checksum of both ends of each shard."""
    checksum = 0
    for shard in source.shards:
        for end in (shard[:_FINGERPRINT_TOKENS], shard[-_FINGERPRINT_TOKENS:]):
            checksum = zlib.crc32(end.tobytes(), checksum)
    return {"tokens": source.num_tokens, "crc32": checksum}


def check_same_data(ranks: Ranks, material: Material) -> None:
    """Check that all ranks read one text, and no two replicas the same sequences of it; collective.

    Raises:
        DataError: on every rank, naming one that differs.
    """
    corpus, loader = material.corpus, material.loader
    own = (fingerprint(corpus.train), fingerprint(corpus.val), corpus.tokenizer.vocab_size)
    seen = ranks.gather((own, loader.rank, loader.upcoming()))
    for rank, (theirs, _, _) in enumerate(seen):
        if theirs != seen[0][0]:
            raise DataError(
                f"ranks 0 and {rank} do not read the same data: rank 0 has {_describe(seen[0][0])}, "
                f"rank {rank} {_describe(theirs)}; give all hosts the same files"
            )
    check_assignments(list({replica: sequences for _, replica, sequences in seen}.values()))


def _describe(data: tuple[dict[str, int], dict[str, int], int]) -> str:
    train, val, vocab_size = data
    return (
        f"{train['tokens']:,} tokens (CRC {train['crc32']:08x}) to train and {val['tokens']:,} held back "
        f"of a vocabulary of {vocab_size:,}"
    )
