"""The weights that a run starts from: drawn from the seed, another run's, or a Hugging Face folder's."""

from pathlib import Path
from typing import Any

import torch

from gradsync.data.tokenizer import Tokenizer
from gradsync.errors import ConfigError
from gradsync.model.gpt2 import GPT2, GPT2Config
from gradsync.train.checkpoint import MANIFEST_NAME, list_checkpoints
from gradsync.train.config import TrainConfig, flag
from gradsync.train.runfolder import RunFolder
from gradsync.train.trained import load_trained


def initial_model(config: TrainConfig, tokenizer: Tokenizer) -> GPT2:
    """Return the model of a new run, the same on every rank.

    Raises:
        ConfigError: ``--init-from`` is no model, or doesn't fit the tokenizer or the other options.
    """
    torch.manual_seed(config.seed)
    if config.init_from is None:
        return GPT2(model_config(config, tokenizer.vocab_size))
    source = Path(config.init_from)
    if not source.exists() and (shape := _shape_of_resumed(config)) is not None:
        return GPT2(shape)  # the weights are the checkpoint's, and where they came from once may be gone
    given = _read(source)
    shape = given.config
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
    return _with_context(given, config.context, config.dropout)


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
    return None if newest is None else GPT2Config(**newest.facts["model"])


def model_config(config: TrainConfig, vocab_size: int) -> GPT2Config:
    """Return the preset's model with what the options change of it."""
    given = {"num_layers": config.layers, "num_heads": config.heads, "width": config.width}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return GPT2Config.preset(
        config.preset, vocab_size=vocab_size, context=config.context, dropout=config.dropout, **changes
    )


def _read(source: Path) -> GPT2:
    if RunFolder(source).config_file.is_file() or (source / MANIFEST_NAME).is_file():
        return load_trained(source, "newest", "cpu").model
    if (source / "config.json").is_file():
        from gradsync.model.huggingface import import_gpt2

        return import_gpt2(source)
    raise ConfigError(
        f"--init-from {source} is neither a run folder nor a Hugging Face folder; "
        f"give one that holds config.yaml or config.json"
    )


def _with_context(given: GPT2, context: int, dropout: float) -> GPT2:
    """Return the model for shorter sequences and another dropout rate; positions beyond them are dropped."""
    shape = given.config
    model = GPT2(
        GPT2Config(
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            width=shape.width,
            context=context,
            vocab_size=shape.vocab_size,
            padded_vocab_size=shape.padded_vocab_size,
            dropout=dropout,
            bias=shape.bias,
        )
    )
    weights = given.state_dict()
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][:context]
    model.load_state_dict(weights)
    return model.train()
