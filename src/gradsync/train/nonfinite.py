"""Finding the sequences whose loss or gradient is not finite, once a step was not. Rare, so it may be slow."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gradsync.model.mode import in_evaluation
from gradsync.parallel.replica import Replica
from gradsync.train.ranks import Ranks


def find_sequences(
    replica: Replica, micro_batches: Iterable[tuple[Tensor, Tensor]], numbers: Sequence[int], device: torch.device
) -> list[int]:
    """Return the global numbers of this rank's sequences that give no finite loss or gradient by themselves.

    Works on the bare model and without accumulating gradients. Where the model is on this rank alone no other takes
    part; where several ranks run it together they search together, and look at losses only. Dropout is off: a sequence
    that fails only under one dropout mask is not found.
    """
    sequences = [pair for inputs, targets in micro_batches for pair in zip(inputs, targets, strict=True)]
    with in_evaluation(replica):
        return [
            number
            for number, (inputs, targets) in zip(numbers, sequences, strict=False)  # fillers have no number
            if not _is_finite(replica, inputs[None].to(device), targets[None].to(device))
        ]


def find_parameter(replica: Replica, micro_batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> str:
    """Return where in backward a gradient of this rank first was not finite: a parameter, and its bucket if any.

    Without buckets backward is taken to go from the last parameter to the first. Empty if every gradient is finite, and
    where several ranks run a model together.
    """
    if replica.is_collective:
        return ""
    buckets = [] if replica.ddp is None else replica.ddp.report().buckets
    bucket_of = {place.name: bucket.number for bucket in buckets for place in bucket.parameters}
    trained = {name: held.tensor for name, held in replica.held.items() if _is_trained(held.tensor)}
    order = [name for name in bucket_of if name in trained] or list(reversed(trained))
    with in_evaluation(replica):
        for inputs, targets in micro_batches:
            loss = replica.summed_loss(inputs.to(device), targets.to(device))
            gradients = torch.autograd.grad(loss, [trained[name] for name in order], allow_unused=True)
            for name, gradient in zip(order, gradients, strict=True):
                if gradient is not None and not bool(torch.isfinite(gradient).all()):
                    return f"{name}, bucket {bucket_of[name]}" if name in bucket_of else name
    return ""


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


def _is_finite(replica: Replica, inputs: Tensor, targets: Tensor) -> bool:
    if replica.is_collective:
        with torch.no_grad():
            return bool(torch.isfinite(replica.summed_loss(inputs, targets)))
    loss = replica.summed_loss(inputs, targets)
    parameters = [held.tensor for held in replica.held.values() if _is_trained(held.tensor)]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    values = [loss, *(gradient for gradient in gradients if gradient is not None)]
    return all(bool(torch.isfinite(value).all()) for value in values)


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad
