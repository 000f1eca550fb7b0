"""Making the default process group under the eyes of a watch.

A backend that connects the ranks waits for each of them, and knows of none that has failed after the roll call or is
gone. So the watch begins before there is a group.
"""

from collections.abc import Callable, Mapping
from typing import Any

from gradsync.comm.ledger import FAILED_START, STARTING, Place
from gradsync.comm.waits import Waits
from gradsync.comm.watches import watch_of_world, watch_start


class _StartWaits(Waits):
    """Waiting for the group: as long as it takes where all ranks are at it, since many need their time to connect."""

    def patience_with(self, places: Mapping[int, Place]) -> float:
        return self.limit_s if all(place.phase == STARTING for place in places.values()) else 0.0


def make_watched(
    store: Any, rank: int, world: int, soft_limit_s: float, is_of_any_thread: bool, make: Callable[[], object]
) -> None:
    """Make the default group; where it may be another thread's doing, with an end to it if a rank does not come.

    Raises:
        RankFailedError: another rank has failed or is gone.
        StalledError: some rank did not come; the message says where all ranks are.
    """
    watch = watch_start(store, rank, world, soft_limit_s)
    if watch is None:
        make()
        return
    waits = _StartWaits(None, watch, None)
    try:
        if is_of_any_thread:
            waits.beside(make)
        else:
            make()
    except BaseException:
        watch.phase = FAILED_START
        raise
    watch_of_world()  # takes it over
