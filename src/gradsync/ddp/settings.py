"""How one reducer is to work; fixed at construction."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Reduction(enum.StrEnum):
    """What becomes of the ranks' gradients."""

    MEAN = "mean"
    """Their sum divided by the number of ranks."""
    SUM = "sum"
    """Their sum."""
    WEIGHTED = "weighted"
    """Their sum divided by the sum of all gradient weights, over ranks and accumulation steps."""


@dataclass(frozen=True)
class Settings:
    """The choices that the reducer needs to know."""

    caps_bytes: Sequence[float] | None
    """Limits of the buckets; None for those that suit the parameters."""
    reduction: Reduction = Reduction.MEAN
    check_replicas_every: int = 0
    """Passes between comparisons of the ranks' parameters; 0 for none."""
    check_finite: bool = False
    """Whether to look for gradients that are infinite or not a number before they are averaged."""
    soft_limit_s: float | None = None
    """How long to wait for the other ranks; None for the process's own limit."""
    tunes_buckets: bool = False
    """Whether the plan is to be fitted to the link once it is known when gradients arrive."""
