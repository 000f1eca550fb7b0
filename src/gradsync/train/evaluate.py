"""Validation loss over all ranks, by sums and counts: the number of ranks does not change it.

Works on the bare model, so it runs no collective of the engine and recompiles nothing. Ranks that share a replica run
it together, and one of them counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.model.gpt2 import IGNORED_TARGET
from gradsync.model.mode import in_evaluation
from gradsync.parallel.replica import Replica
from gradsync.train.ranks import Ranks


@dataclass(frozen=True)
class Evaluation:
    """A mean loss in nats per token and the number of tokens it was taken over."""

    loss: float
    tokens: int


@torch.no_grad()
def evaluate(
    replica: Replica, batches: Iterable[tuple[Tensor, Tensor]], ranks: Ranks, device: torch.device
) -> Evaluation:
    """Return the mean loss over the batches of all ranks; every rank must call it."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    with in_evaluation(replica):
        for inputs, targets in batches:
            inputs, targets = inputs.to(device), targets.to(device)
            totals[0] += replica.summed_loss(inputs, targets)
            if replica.speaks:
                totals[1] += (targets != IGNORED_TARGET).sum()
    ranks.start_sum(totals)()
    loss_sum, tokens = totals.tolist()
    return Evaluation(loss_sum / tokens, int(tokens))
