"""Accuracy on completion tasks of HellaSwag's form: which of several endings does the model find likeliest?

The file has one JSON object a line with ``ctx``, ``endings`` and ``label``, as HellaSwag is published.
Two figures: by the ending's log-likelihood, and by its mean over the ending's tokens (length-normalised;
long endings are at no disadvantage). The ranks share the examples; sums and counts are added up.

Shapes: E endings, T tokens of the longest of them with its context, V vocabulary.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsync.data.tokenizer import Tokenizer
from gradsync.errors import ConfigError, DataError
from gradsync.model.gpt2 import IGNORED_TARGET
from gradsync.model.mode import in_evaluation
from gradsync.parallel.replica import Replica
from gradsync.train.ranks import Ranks


@dataclass(frozen=True)
class Example:
    """A context and its possible endings, one of which is right."""

    context: str
    endings: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class Accuracy:
    """Shares of examples answered rightly, by likelihood and by mean likelihood of a token."""

    by_sum: float
    by_mean: float
    examples: int


def read_examples(path: Path) -> list[Example]:
    """Read a file of examples.

    Raises:
        ConfigError: there is no such file.
        DataError: the file cannot be read, holds none, or a line isn't one; the line is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # other line separators may stand in a text
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; give a file of examples as JSON lines") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    examples = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not examples:
        raise DataError(f"{path} holds no example; expected JSON lines with ctx, endings and label")
    return examples


@torch.no_grad()
def completion_accuracy(
    replica: Replica, tokenizer: Tokenizer, examples: Sequence[Example], ranks: Ranks, device: torch.device
) -> Accuracy:
    """Return the accuracy over all examples; every rank must call it with the same ones."""
    right = torch.zeros(2, dtype=torch.float64, device=device)
    with in_evaluation(replica):
        for example, counts in _own_examples(examples, replica):
            inputs, targets = _rows(example, tokenizer, replica.config.context)
            sums = _log_likelihoods(replica, inputs.to(device), targets.to(device))  # E
            lengths = (targets != IGNORED_TARGET).sum(dim=1).to(device)  # E
            if counts:
                right[0] += int(sums.argmax()) == example.label
                right[1] += int((sums / lengths).argmax()) == example.label
    ranks.start_sum(right)()
    by_sum, by_mean = (right / len(examples)).tolist()
    return Accuracy(by_sum, by_mean, len(examples))


def _own_examples(examples: Sequence[Example], replica: Replica) -> Iterator[tuple[Example, bool]]:
    """Yield this replica's examples, and whether this rank counts them; as many on every rank, some for nothing."""
    most_of_a_rank = -(-len(examples) // replica.data_world)
    for turn in range(most_of_a_rank):
        number = turn * replica.data_world + replica.data_rank
        is_there = number < len(examples)
        if is_there or replica.is_collective:
            yield examples[number if is_there else 0], is_there and replica.speaks


def _log_likelihoods(model: Replica, inputs: Tensor, targets: Tensor) -> Tensor:
    logits, _ = model(inputs)  # E, T, V
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="none"
    )
    return -losses.view(targets.shape).sum(dim=1)  # E


def _rows(example: Example, tokenizer: Tokenizer, context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (E, T); only the endings' tokens are targets.

    Endings are words of their own, hence the blank before them. Where context and ending are longer than
    the model can see, the context loses its beginning.
    """
    before = tokenizer.encode(example.context).tolist() or [tokenizer.end_of_text]
    endings = [tokenizer.encode(" " + ending).tolist()[:context] for ending in example.endings]
    rows = [(before + ending)[-(context + 1) :] for ending in endings]
    longest = max(map(len, rows))
    inputs = torch.zeros(len(rows), longest - 1, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED_TARGET)
    for i, (row, ending) in enumerate(zip(rows, endings, strict=True)):
        inputs[i, : len(row) - 1] = torch.tensor(row[:-1])
        targets[i, len(row) - 1 - len(ending) : len(row) - 1] = torch.tensor(ending)
    return inputs, targets


def _parse(line: str, where: str) -> Example:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise _no_example(line, where)
    context, endings, label = (entry.get(key) for key in ("ctx", "endings", "label"))
    if isinstance(label, str) and label.isdecimal():  # as some copies of HellaSwag have it
        label = int(label)
    if not isinstance(context, str) or not isinstance(endings, list) or type(label) is not int:
        raise _no_example(line, where)
    if not all(isinstance(ending, str) and ending for ending in endings):
        raise _no_example(line, where)
    if not 0 <= label < len(endings):
        raise DataError(f"{where}: label {label} is not the number of one of {len(endings)} endings")
    return Example(context, tuple(endings), label)


def _no_example(line: str, where: str) -> DataError:
    return DataError(
        f"{where}: expected an object with ctx (text), endings (a list of texts) and label (a number), got {line:.80}"
    )
