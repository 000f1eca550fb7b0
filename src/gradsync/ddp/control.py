"""Control words: a few float32 numbers that every pass sums over the ranks, mostly for nothing.

They ride behind the gradients of the last bucket, or in a small collective of their own. After the sum
every rank knows of every parameter how many ranks used it and how many were late with it, and of every
rank what it wrote into its own slot. Numbers are small whole numbers, which float32 sums
exactly; in a slot, where all ranks but one add 0, they may be any.

    [ used, one a parameter | late, one a parameter | slot of rank 0 | slot of rank 1 | ... ]
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.float32]
"""Memory of a tensor, looked at through numpy: there a few numbers are read and written in a microsecond."""

NO_WORDS: Words = np.empty(0, dtype=np.float32)

WORD_LIMIT = 2**24


class RankState(enum.IntEnum):
    """What a rank says of itself in its slot."""

    TRAINING = 1
    """It runs this pass from its own backward."""
    JOINED = 2
    """It has no more batches and takes part with zeros."""
    ABANDONED = 3
    """Its backward raised an exception; it completes the pass so that the others don't wait."""


class Slot(NamedTuple):
    """What one rank tells the others in a pass; each field is one word."""

    state: int
    pass_number: int
    plan_digest: int
    change_digest: int
    """0, or a digest of the set of trainable parameters that this rank now has instead of the planned one."""
    weight_high: int
    weight_low: float
    """The gradient weight is ``weight_high * 2**20 + weight_low``."""
    data_s: float = 0.0
    """Seconds of this window in each of the rank's own phases (see ``timeline``)."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    replica_digest: float = 0.0
    """0, or a digest of the parameters in a pass that compares them."""
    non_finite: float = 0.0
    """0, or 1 more than the index of the parameter whose gradient was the first that is not finite."""

    @property
    def local_times(self) -> tuple[float, ...]:
        """The seconds, in the order of ``timeline.LOCAL_PHASES``."""
        return self.data_s, self.forward_s, self.backward_s, self.optimizer_s

    @property
    def weight(self) -> float:
        """How many tokens or samples this rank's summed loss stands for."""
        return self.weight_high * float(2**20) + self.weight_low


SLOT_WORDS = len(Slot._fields)
_NUM_WHOLE = 5
"""The first fields of a slot are read as whole numbers."""


@dataclass(frozen=True)
class ControlWords:
    """The words of one pass, summed over all ranks."""

    used: Sequence[float]
    """For each parameter the number of ranks that used it."""
    late_anywhere: Sequence[int]
    """Indices of the parameters that some rank was late with."""
    slots: tuple[Slot, ...]
    num_used_least: float
    """The smallest number in ``used``; if there are no parameters, the number of ranks."""

    @property
    def num_training(self) -> int:
        """Number of ranks that had a batch in this pass."""
        return sum(slot.state != RankState.JOINED for slot in self.slots)

    @property
    def total_weight(self) -> float:
        """Sum of the gradient weights of all ranks."""
        return sum(slot.weight for slot in self.slots)


def num_words(num_parameters: int, world_size: int) -> int:
    """Return how many words a pass needs."""
    return 2 * num_parameters + SLOT_WORDS * world_size


def write_words(
    target: Words, used: Iterable[int] | None, late: Iterable[int], slot: Slot, rank: int, num_parameters: int
) -> None:
    """Fill ``target`` (``num_words`` long) with this rank's share; ``used`` is None if all parameters were used."""
    target.fill(0.0)
    if used is None:
        target[:num_parameters] = 1.0
    else:
        target[list(used)] = 1.0
    for index in late:
        target[num_parameters + index] = 1.0
    start = 2 * num_parameters + SLOT_WORDS * rank
    target[start : start + SLOT_WORDS] = slot


def read_words(source: Words, num_parameters: int) -> ControlWords:
    """Read the summed words."""
    used, late = source[:num_parameters], source[num_parameters : 2 * num_parameters]
    words = source[2 * num_parameters :].tolist()
    slots = []
    for start in range(0, len(words), SLOT_WORDS):
        slot = words[start : start + SLOT_WORDS]
        slots.append(Slot(*map(int, slot[:_NUM_WHOLE]), *slot[_NUM_WHOLE:]))
    late_anywhere = late.nonzero()[0].tolist() if late.any() else []
    return ControlWords(used.tolist(), late_anywhere, tuple(slots), float(used.min(initial=len(slots))))


def split_weight(weight: float) -> tuple[int, float]:
    """Split a weight into the two words that carry it."""
    high = int(weight // 2**20)
    return high, weight - high * 2**20
