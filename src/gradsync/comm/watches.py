"""The watches of this process, one a default group, and what asks for them."""

import atexit
import os
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist

from gradsync.comm.ledger import STARTING, Ledger, can_hold_ledger
from gradsync.comm.watch import Watch, default_group

DEFAULT_SOFT_LIMIT_S = 60.0

_LAST_LOOK_S = 1.0


def excused(what: str) -> AbstractContextManager[None]:
    """Ask the other ranks to be patient while this rank alone does something long."""
    watch = watch_of_world()
    return nullcontext() if watch is None else watch.excused(what)


def note_loop(text: str) -> None:
    """Note what this rank's training loop does from now on (``step 12, data``), for the others to read if they wait."""
    watch = watch_of_world()
    if watch is not None:
        watch.loop = text


@contextmanager
def explaining() -> Iterator[None]:
    """Have an error that only echoes another rank's raised as that one; of whatever collective, by whomever issued.

    Raises:
        RankFailedError: another rank has failed or is gone.
        StalledError: the ranks were found to have lost each other.
    """
    try:
        yield
    except Exception as error:
        watch = watch_of_world()
        explained = error if watch is None else watch.behind(error, range(watch.world))
        if explained is error:
            raise
        raise explained from None if explained.args == error.args else error


_watches: "weakref.WeakKeyDictionary[Any, Watch]" = weakref.WeakKeyDictionary()
_begun: "weakref.WeakSet[Watch]" = weakref.WeakSet()
"""All whose threads may run, also those of groups that are gone."""
_starting: Watch | None = None
"""The watch over ranks whose default group is being made, or could not be made."""
_soft_limit_s = DEFAULT_SOFT_LIMIT_S


def set_soft_limit(limit_s: float) -> None:
    """Let waits of this process that name no limit of their own take this one; 0 means none."""
    global _soft_limit_s
    _soft_limit_s = limit_s
    watch = watch_of_world()
    if watch is not None:
        watch.soft_limit_s = limit_s


def watch_start(store: Any, rank: int, world: int, soft_limit_s: float) -> Watch | None:
    """Return a watch over ranks that are about to make their default group, which it watches over afterwards."""
    global _starting
    if _starting is not None:
        _starting.stop()
    _starting = None if world == 1 or not can_hold_ledger(store) else Watch(Ledger(store, rank, world), soft_limit_s)
    if _starting is not None:
        _starting.phase = STARTING
        _begin(_starting)
    return _starting


def watch_of_world() -> Watch | None:
    """Return the watch over the default group, started when first asked for; None where there is nothing to watch."""
    global _starting
    group = default_group()
    if group is None:
        return _starting
    if group.size() == 1:
        return None
    if group not in _watches and _starting is not None and _starting.phase == STARTING:
        _watches[group], _starting = _starting, None
        _watches[group].adopt(group)
    elif group not in _watches:
        store = dist.distributed_c10d._get_default_store()
        if not can_hold_ledger(store):
            return None
        _watches[group] = Watch(Ledger(store, group.rank(), group.size()), _soft_limit_s)
        _begin(_watches[group])
    return _watches[group]


def watch_of_last_world() -> Watch | None:
    """Return the watch over the default group, or over one that was destroyed just now, by a rank that fails."""
    watch = watch_of_world()
    if watch is not None or default_group() is not None:
        return watch
    return next((each for each in list(_begun) if each.is_parting), None)


def _begin(watch: Watch) -> None:
    _begun.add(watch)
    watch.start()
    atexit.unregister(_stop_all_at_exit)
    atexit.register(_stop_all_at_exit)


def _forget_in_child() -> None:
    """A forked child has neither the threads nor the say of its parent."""
    global _starting
    for watch in list(_begun):
        watch.stop()
    _begun.clear()
    _watches.clear()
    _starting = None


def stop_all(patience_s: float) -> bool:
    """End every watch of this process, before the interpreter shuts down; returns whether all have ended."""
    return all([watch.stop(patience_s) for watch in list(_begun)])


def _stop_all_at_exit() -> None:
    stop_all(_LAST_LOOK_S)


os.register_at_fork(after_in_child=_forget_in_child)
