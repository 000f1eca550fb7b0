"""The weights that a run starts from: drawn from the seed, another run's, or a Hugging Face folder's."""

from dataclasses import replace
from pathlib import Path

import torch

from gradsync.data.tokenizer import Tokenizer
from gradsync.errors import CheckpointError, ConfigError
from gradsync.model.gpt2 import GPT2, GPT2Config
from gradsync.train.checkpoint import list_checkpoints, open_checkpoint
from gradsync.train.config import TrainConfig, flag
from gradsync.train.outline import shape_of
from gradsync.train.runfolder import MANIFEST_NAME, RunFolder
from gradsync.train.trained import load_trained, shape_of_checkpoint


def initial_model(config: TrainConfig, tokenizer: Tokenizer) -> GPT2:
    """Return the model of a new run, the same on every rank.

    Raises:
        ConfigError: ``--init-from`` is no model, or doesn't fit the tokenizer or the other options.
    """
    torch.manual_seed(config.seed)
    shape = shape_of(config, tokenizer)
    if config.init_from is None:
        return GPT2(shape)
    model = GPT2(shape)
    if not Path(config.init_from).exists():
        return model  # a resumed run's, see ``starting_shape``
    weights = _read(Path(config.init_from)).state_dict()
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][: shape.context]
    model.load_state_dict(weights)
    return model.train()


def starting_shape(config: TrainConfig, tokenizer: Tokenizer) -> GPT2Config:
    """Return the shape of ``--init-from`` for this run's sequences and dropout rate; positions beyond are dropped.

    Raises:
        ConfigError: it is no model, or doesn't fit the tokenizer or the other options.
    """
    assert config.init_from is not None
    source = Path(config.init_from)
    if not source.exists() and (resumed := _shape_of_resumed(config)) is not None:
        return resumed  # the weights are the checkpoint's, and where they came from once may be gone
    shape = _read_shape(source)
    if shape.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"--init-from {source} has a vocabulary of {shape.vocab_size:,} tokens, the data's tokenizer "
            f"({tokenizer.name}) has {tokenizer.vocab_size:,}; prepare the data with the model's tokenizer"
        )
    wanted = {"layers": shape.num_layers, "heads": shape.num_heads, "width": shape.width}
    for name, value in wanted.items():
        if getattr(config, name) not in (None, value):
            raise ConfigError(
                f"{flag(name)} is {getattr(config, name)}, but --init-from {source} has {value}; leave {flag(name)} out"
            )
    if config.context > shape.context:
        raise ConfigError(
            f"--context {config.context} is more than the {shape.context} that --init-from {source} was trained "
            f"for; give at most that"
        )
    return replace(shape, context=config.context, dropout=config.dropout)


def check_can_begin(config: TrainConfig) -> None:
    """Check that a resumed run without an intact checkpoint has what it started from.

    Raises:
        ConfigError: ``--init-from`` is gone.
    """
    if config.init_from is not None and not Path(config.init_from).exists():
        raise ConfigError(
            f"run folder {config.run} holds no intact checkpoint, and --init-from {config.init_from}, from which it "
            f"would start again, does not exist; put it back, or start a new run"
        )


def _shape_of_resumed(config: TrainConfig) -> GPT2Config | None:
    if not config.resume or config.run is None:
        return None
    newest = next(iter(list_checkpoints(RunFolder(config.run).checkpoints)), None)
    return None if newest is None else shape_of_checkpoint(newest)


def _read_shape(source: Path) -> GPT2Config:
    """Read the shape alone: no weights, and nothing is verified."""
    if (source / MANIFEST_NAME).is_file():
        return shape_of_checkpoint(open_checkpoint(source))
    if RunFolder(source).config_file.is_file():
        found = list_checkpoints(RunFolder(source).checkpoints)
        if not found:
            raise CheckpointError(f"--init-from {source} holds no checkpoint; train it first, or give another run")
        return shape_of_checkpoint(found[0])
    if (source / "config.json").is_file():
        from gradsync.model.huggingface import read_config

        return read_config(source)
    raise ConfigError(
        f"--init-from {source} is neither a run folder nor a Hugging Face folder; "
        f"give one that holds config.yaml or config.json"
    )


def _read(source: Path) -> GPT2:
    if RunFolder(source).config_file.is_file() or (source / MANIFEST_NAME).is_file():
        return load_trained(source, "newest", "cpu").model
    from gradsync.model.huggingface import import_gpt2

    return import_gpt2(source)
