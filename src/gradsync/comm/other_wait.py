"""A wait of this rank in a collective that is not the engine's: torch's, or the user's own.

Nobody has announced it; ``standstill`` has seen it. What it means is in ``watch``, [Note: Other collectives].
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from gradsync.comm.ledger import Place
from gradsync.errors import GradsyncError

STRICT_ANSWER_LIMITS = 1 / 12
"""A busy machine may need longer than a moment, and whoever has waited for long can wait for that."""
_LENIENT_ANSWER_LIMITS = 1.0


class OtherWait:
    """Such a wait; ``is_strict``: a rank that does not get on is as bad as one that does not answer."""

    thread: int | None = None

    def __init__(self, since_s: float, limit_s: float, is_strict: bool) -> None:
        self.since_s = since_s
        self.patient_until_s = 0.0
        self.members: list[int] = []
        self.limit_s = limit_s
        self.answer_limits = STRICT_ANSWER_LIMITS if is_strict else _LENIENT_ANSWER_LIMITS
        self.is_strict = is_strict

    def patience_with(self, places: Mapping[int, Place]) -> float:
        """Return how long to wait before asking again, by where the others are."""
        if not self.is_strict:
            return self.limit_s
        return self.limit_s - min(place.still_s for place in places.values())

    @staticmethod
    def interrupt(error: GradsyncError) -> None:
        """End it where a group can be ended, whichever it is: the rank is lost anyway."""
        for group in list(dist.distributed_c10d._world.pg_map):
            give_up(group, error)


def give_up(group: Any, error: GradsyncError) -> None:
    """End the waits of a group written in Python; of others nobody can."""
    end = getattr(group, "give_up", None)
    if end is not None:
        end(error)
