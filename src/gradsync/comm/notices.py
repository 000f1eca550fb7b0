"""Texts exchanged through the store instead of a collective.

A collective pairs with whatever the other ranks have issued, so a rank that is somewhere else turns it into nonsense, a
crash or a hang. Notices pair by their name only: who has not written his is missing, and can be asked where he is.
"""

import time
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from gradsync.comm.groups import Group
from gradsync.comm.ledger import can_hold_ledger
from gradsync.comm.waits import Cuttable, Waits
from gradsync.comm.watch import Watch
from gradsync.comm.watches import watch_of_world

_torch: Any = dist  # for what torch's stubs leave out
_QUICK_S = 0.05
_QUICK_LOOK_S = 0.0005
_LOOK_S = 0.005
# Of each world, for its watch is one: ranks that have been in other worlds before count from the start again, too.
_rounds: "weakref.WeakKeyDictionary[Watch, Counter[str]]" = weakref.WeakKeyDictionary()


def exchange_notices(group: Group, topic: str, text: str) -> list[str] | None:
    """Return every rank's text, in rank order; None if the ranks share no store for it.

    Raises:
        RankFailedError: another rank has failed or is gone.
        StalledError: some rank did not come; the message says where all ranks are.
    """
    watch = watch_of_world()
    entry = dist.distributed_c10d._world.pg_map.get(group)
    if watch is None or entry is None or not can_hold_ledger(entry[1]):
        return None
    name = f"{group.group_name}/{topic}"
    rounds = _rounds.setdefault(watch, Counter())
    rounds[name] += 1
    store = _torch.PrefixStore(f"gradsync/notices/{name}/{rounds[name]}", dist.distributed_c10d._get_default_store())
    store.set(str(group.rank()), text)
    keys = [str(rank) for rank in range(group.size())]
    Waits(group, watch, None).wait(_Notices(store, keys))
    if store.has_extended_api():
        return [value.decode() for value in store.multi_get(keys)]
    return [store.get(key).decode() for key in keys]


class _Notices(Cuttable):
    """The arrival of all notices."""

    def __init__(self, store: Any, keys: Sequence[str]) -> None:
        self._store = store
        self._keys = list(keys)

    def wait(self, limit: timedelta | None = None) -> None:
        """See ``Cuttable``; looks again and again, since torch prints a warning of its own when a store's wait ends."""
        begun_s = time.monotonic()
        limit_s = (limit or default_pg_timeout).total_seconds()
        while not self._store.check(self._keys):
            waited_s = time.monotonic() - begun_s
            if waited_s > limit_s:
                raise RuntimeError(f"the word of some ranks has not come within {limit_s:g} s")
            time.sleep(_QUICK_LOOK_S if waited_s < _QUICK_S else _LOOK_S)

    def is_completed(self) -> bool:
        """Whether all notices are there."""
        return bool(self._store.check(self._keys))
