"""What the ranks tell each other once a step: their losses, and whether they were asked to stop.

One small sum, started before the last backward and read after it, so that it costs no waiting. Every
rank reads the same numbers and so takes the same decision.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.train.interrupt import StopReason
from gradsync.train.ranks import Ranks


@dataclass(frozen=True)
class Verdict:
    """The outcome of one step's vote, equal on all ranks."""

    loss_sums: list[float]
    reason: StopReason

    @property
    def loss_sum(self) -> float:
        """The loss summed over the tokens of all ranks."""
        return math.fsum(self.loss_sums)

    @property
    def non_finite_ranks(self) -> list[int]:
        """The ranks whose loss is infinite or not a number."""
        return [rank for rank, loss in enumerate(self.loss_sums) if not math.isfinite(loss)]


class StepVote:
    """A vote under way. A slot for each rank's loss, then one for each reason to stop."""

    def __init__(self, ranks: Ranks, loss_sum: Tensor, reason: StopReason) -> None:
        self._world = ranks.world
        self._numbers = torch.zeros(ranks.world + len(StopReason), dtype=torch.float64, device=loss_sum.device)
        self._numbers[ranks.rank] = loss_sum
        self._numbers[ranks.world + reason] = 1.0
        self._wait = ranks.start_sum(self._numbers)

    def result(self) -> Verdict:
        """Wait for the sum and read it."""
        self._wait()
        numbers = self._numbers.tolist()
        asked = [reason for reason in StopReason if numbers[self._world + reason] > 0]
        return Verdict(numbers[: self._world], max(asked))
