"""Finding the sequences whose loss or gradient is not finite, once a step was not. Rare, so it may be slow."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gradsync.train.ranks import Ranks


def find_sequences(
    model: nn.Module,
    micro_batches: Iterable[tuple[Tensor, Tensor]],
    numbers: Sequence[int],
    device: torch.device,
) -> list[int]:
    """Return the global numbers of this rank's sequences that give no finite loss or gradient by themselves.

    Works on the bare model and without accumulating gradients, so no other rank takes part. Dropout
    is off: a sequence that fails only under one dropout mask is not found.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sequences = [pair for inputs, targets in micro_batches for pair in zip(inputs, targets, strict=True)]
    was_training = model.training
    model.eval()
    try:
        return [
            number
            for number, (inputs, targets) in zip(numbers, sequences, strict=False)  # fillers have no number
            if not _is_finite(model, parameters, inputs[None].to(device), targets[None].to(device))
        ]
    finally:
        model.train(was_training)


def find_parameter(
    model: nn.Module,
    micro_batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    buckets: Sequence[Sequence[str]],
) -> str:
    """Return where in backward a gradient of this rank first was not finite: a parameter, and its bucket if any.

    ``buckets`` are names in the order in which the gradients are sent; without them backward is taken to go from the
    last parameter to the first. Empty if every gradient is finite.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    bucket_of = {name: number for number, names in enumerate(buckets) for name in names}
    order = [name for name in bucket_of if name in named] or list(reversed(named))
    was_training = model.training
    model.eval()  # as the search for the sequences
    try:
        for inputs, targets in micro_batches:
            _, loss = model(inputs.to(device), targets.to(device), reduction="sum")
            gradients = torch.autograd.grad(loss, [named[name] for name in order], allow_unused=True)
            for name, gradient in zip(order, gradients, strict=True):
                if gradient is not None and not bool(torch.isfinite(gradient).all()):
                    return f"{name}, bucket {bucket_of[name]}" if name in bucket_of else name
        return ""
    finally:
        model.train(was_training)


def explain(
    ranks: Ranks, step: int, found: list[int], grad_norm: float, lost_ranks: list[int], parameter: str = ""
) -> str:
    """Return one sentence about a step that was not finite; every rank must call it."""
    first_in = ranks.gather(parameter)
    by_rank = {rank: numbers for rank, numbers in enumerate(ranks.gather(found)) if numbers}
    what = "the loss" if lost_ranks else f"the gradient (norm {grad_norm})"
    where = lost_ranks or list(by_rank)
    places = []
    for rank in where:
        numbers = ", ".join(map(str, by_rank.get(rank, []))) or "none by itself"
        first = f"; first in {first_in[rank]}" if first_in[rank] else ""
        places.append(f"rank {rank} (sequences: {numbers}{first})")
    return f"step {step}: {what} is not finite on {', '.join(places) or 'the sum of all ranks only'}"


def _is_finite(model: nn.Module, parameters: list[nn.Parameter], inputs: Tensor, targets: Tensor) -> bool:
    _, loss = model(inputs, targets, reduction="sum")
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    values = [loss, *(gradient for gradient in gradients if gradient is not None)]
    return all(bool(torch.isfinite(value).all()) for value in values)
