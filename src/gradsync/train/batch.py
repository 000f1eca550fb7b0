"""How one optimizer step's tokens are divided: sequences, ranks, micro-batches. Plain arithmetic.

A step has ``batch_tokens`` tokens over all ranks. They are cut into sequences of ``context`` tokens,
every rank takes the same number of them, in equal micro-batches. What does not divide is refused
here, with the nearest values that do.
"""

from dataclasses import dataclass

from gradsync.errors import ConfigError

# More does not make a CPU faster; it only takes memory.
_CPU_MICRO_BATCH_TOKENS = 1024
_MICRO_BATCHES_PER_STAGE = 4


@dataclass(frozen=True)
class BatchPlan:
    """The division of one step; every number is exact, nothing is rounded or padded."""

    context: int
    sequences_per_step: int
    sequences_per_rank: int
    micro_batch: int

    @property
    def accumulation(self) -> int:
        """Micro-batches that a rank takes in one step."""
        return self.sequences_per_rank // self.micro_batch

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all ranks: what the summed loss is divided by."""
        return self.sequences_per_step * self.context


def micro_batch_limit(maximum: int, context: int, device_type: str) -> int:
    """Return the most sequences that a rank is to take at once where no micro-batch is given."""
    return min(maximum, max(1, _CPU_MICRO_BATCH_TOKENS // context)) if device_type == "cpu" else maximum


def plan_batch(
    batch_tokens: int, context: int, replicas: int, micro_batch: int | None, max_micro_batch: int, stages: int = 1
) -> BatchPlan:
    """Divide a step over so many replicas.

    Without a given micro-batch it is the largest one of at most ``max_micro_batch`` that divides, and leaves a
    pipeline of several stages so many of them that it is empty for a fifth of the time at most, if there are so many.

    Raises:
        ConfigError: the tokens don't divide; the nearest numbers that do are named.
    """
    unit = context * replicas * (micro_batch or 1)
    if batch_tokens % unit:
        raise ConfigError(_indivisible(batch_tokens, context, replicas, micro_batch, unit))
    per_rank = batch_tokens // context // replicas
    return BatchPlan(
        context=context,
        sequences_per_step=batch_tokens // context,
        sequences_per_rank=per_rank,
        micro_batch=micro_batch or _choose_micro_batch(per_rank, max_micro_batch, stages),
    )


def _choose_micro_batch(per_rank: int, limit: int, stages: int) -> int:
    if stages > 1:
        wanted = _MICRO_BATCHES_PER_STAGE * stages
        fitting = [size for size in range(1, limit + 1) if per_rank % (size * stages) == 0]
        return max((size for size in fitting if per_rank // size >= wanted), default=min(fitting, default=1))
    return largest_divisor(per_rank, limit)


def choose_num_processes(batch_tokens: int, context: int, micro_batch: int | None, available: int) -> int:
    """Return the most processes, up to those available, among which a step divides evenly."""
    groups = batch_tokens // (context * (micro_batch or 1))
    return largest_divisor(groups, available) if groups else 1


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``limit``."""
    return next(size for size in range(min(number, limit), 0, -1) if number % size == 0)


def _indivisible(batch_tokens: int, context: int, replicas: int, micro_batch: int | None, unit: int) -> str:
    lower = batch_tokens // unit * unit
    nearest = " or ".join(str(value) for value in (lower, lower + unit) if value)
    parts = [f"context {context}", f"{replicas} replica(s)"]
    if micro_batch:
        parts.append(f"micro-batch {micro_batch}")
    return (
        f"--batch-tokens {batch_tokens} does not divide into {' x '.join(parts)} = {unit} tokens; "
        f"the nearest values that do: {nearest}"
    )
