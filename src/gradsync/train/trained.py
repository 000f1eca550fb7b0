"""A trained model, taken from a run folder or one checkpoint: for sampling, evaluation and export.

The checkpoint says which model and which tokenizer it needs; the training data is not needed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gradsync.data.tokenizer import NAMED_TOKENIZERS, Tokenizer, load_tokenizer
from gradsync.errors import CheckpointError, ConfigError
from gradsync.model.gpt2 import GPT2, GPT2Config
from gradsync.train.checkpoint import (
    Checkpoint,
    best_of,
    list_checkpoints,
    newest_intact,
    open_checkpoint,
)
from gradsync.train.runfolder import MANIFEST_NAME, RunFolder, read_config
from gradsync.train.state import match_names, model_tensors

Which = Literal["newest", "best"]


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode with what belongs to it."""

    model: GPT2
    tokenizer: Tokenizer
    device: torch.device
    checkpoint: Path
    step: int
    facts: dict[str, Any]

    @property
    def run(self) -> Path:
        """The run folder that the checkpoint lies in."""
        return self.checkpoint.parent.parent


def load_trained(path: Path, which: Which, device: str) -> Trained:
    """Load a run's newest intact or best checkpoint, or the very checkpoint that ``path`` names.

    Raises:
        ConfigError: the path is no run folder, or the device is not there.
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    checkpoint = _find(path, which)
    place = _place(device)
    model = _model(checkpoint).to(place)
    checkpoint.load(match_names(model_tensors(model), checkpoint.shapes()))
    tokenizer = _tokenizer(checkpoint)
    return Trained(model.eval(), tokenizer, place, checkpoint.folder, checkpoint.step, checkpoint.facts)


def _find(path: Path, which: Which) -> Checkpoint:
    if (path / MANIFEST_NAME).is_file():
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        return checkpoint
    read_config(path)
    complaints: list[str] = []
    folder = RunFolder(path).checkpoints
    found = newest_intact(folder, complaints.append) if which == "newest" else _best(folder)
    if found is None:
        raise CheckpointError(f"{path} holds no intact checkpoint" + "".join(f"; {line}" for line in complaints))
    return found


def _best(folder: Path) -> Checkpoint:
    best = best_of(list_checkpoints(folder))
    if best is None:
        raise CheckpointError(f"no checkpoint in {folder} has a validation loss; take --checkpoint newest")
    best.verify()
    return best


def shape_of_checkpoint(checkpoint: Checkpoint) -> GPT2Config:
    """Return the form of the model that a checkpoint is of.

    Raises:
        CheckpointError: its manifest names none.
    """
    form = checkpoint.fact("model", dict)
    try:
        return GPT2Config(**form)
    except (TypeError, ValueError) as error:
        raise _no_model(checkpoint, error) from error


def _model(checkpoint: Checkpoint) -> GPT2:
    """Return an untrained model of the form that a checkpoint says it has."""
    shape = shape_of_checkpoint(checkpoint)
    try:
        return GPT2(shape)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _no_model(checkpoint, error) from error


def _no_model(checkpoint: Checkpoint, error: Exception) -> CheckpointError:
    form = checkpoint.fact("model", dict)
    return CheckpointError(
        f"{checkpoint.folder / MANIFEST_NAME} is damaged: there is no model of the form {form}: {error}"
    )


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer by its name, or from the run's copy of its file; no other file is opened."""
    copy = RunFolder(checkpoint.folder.parent.parent).tokenizer_file
    name = checkpoint.fact("tokenizer", str)
    if name in NAMED_TOKENIZERS:
        return load_tokenizer(name)
    if not copy.is_file():
        raise CheckpointError(
            f"{checkpoint.folder} needs the tokenizer {Path(name).name!r}, and its run's copy {copy} is missing; copy "
            f"the tokenizer's file there"
        )
    return load_tokenizer(str(copy))


def _place(device: str) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device on this machine; use --device cpu or auto")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)
