"""Private copies of a process group, lent to whoever needs collectives of his own.

A private group has the same ranks as its parent but its own connections, so that its collectives pair only
with each other: two wrapped models in one backward, or a stray collective of the user's, cannot be mixed up
with a gradient bucket. Groups are lent and taken back rather than made and destroyed, since destroying one
at a moment that garbage collection chooses is not safe; the ranks agree which one they take.
"""

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from gradsync.comm.backends import OF_ANY_THREAD
from gradsync.comm.groups import Group, exchange_text, group_timeout
from gradsync.comm.waits import waits_of


@dataclass
class _Shelf:
    """The private groups of one parent and backend: all there are, and which are not lent."""

    parent: "weakref.ref[Group]"
    backend: str
    groups: dict[int, Group] = field(default_factory=dict)
    free: set[int] = field(default_factory=set)


class Lease:
    """A private group on loan: it goes back on the shelf when the last reference to the lease is gone."""

    def __init__(self, shelf: _Shelf, number: int) -> None:
        self.group = shelf.groups[number]
        self._return = weakref.finalize(self, shelf.free.add, number)
        self._return.atexit = False

    def spoil(self) -> None:
        """Keep the group from being lent again: a collective on it has failed."""
        self._return.detach()


_shelves: list[_Shelf] = []


def borrow_group(parent: Group, device: torch.device, backend: str | None = None) -> Lease:
    """Return a private group with the ranks of ``parent``; collective over ``parent``.

    ``device`` is where the parent's collectives run; ``backend`` defaults to the parent's own.
    """
    name = backend or dist.get_backend(parent)
    _clear_away()
    shelf = _shelf_of(parent, name)
    everyone = [
        json.loads(text) for text in exchange_text(parent, json.dumps([sorted(shelf.free), len(shelf.groups)]), device)
    ]
    common = set.intersection(*(set(free) for free, _ in everyone))
    if common:
        number = min(common)
        shelf.free.remove(number)
    else:
        number = max(count for _, count in everyone)
        shelf.groups[number] = _make_watched(parent, name, lambda: _new_group(parent, device, name, number))
    return Lease(shelf, number)


def _shelf_of(parent: Group, backend: str) -> _Shelf:
    for shelf in _shelves:
        if shelf.parent() is parent and shelf.backend == backend:
            return shelf
    _shelves.append(_Shelf(weakref.ref(parent), backend))
    return _shelves[-1]


def _clear_away() -> None:
    """Destroy the groups that nobody has on loan and whose parent the user has destroyed."""
    for shelf in list(_shelves):
        parent = shelf.parent()
        if parent is not None and parent in _world.pg_map:
            continue
        for number in list(shelf.free):
            group = shelf.groups.pop(number)
            shelf.free.discard(number)
            if group in _world.pg_map:
                dist.destroy_process_group(group)
        if not shelf.groups:
            _shelves.remove(shelf)


def _make_watched(parent: Group, backend: str, make: Callable[[], Group]) -> Group:
    """Return what ``make`` returns, with an end to it if another rank does not come; torch itself waits for long."""
    return waits_of(parent).beside(make) if backend in OF_ANY_THREAD else make()


def _new_group(parent: Group, device: torch.device, backend: str, number: int) -> Group:
    """Make a group under a name of our own.

    ``torch.distributed.new_group`` names a group by counting the groups of this process, which may differ between
    the ranks of a subgroup.
    """
    ranks = dist.get_process_group_ranks(parent)
    default_store = _world.pg_map[dist.distributed_c10d._get_default_group()][1]
    name = f"gradsync {parent.group_name} {backend} {number}"
    group, _ = _new_process_group_helper(
        len(ranks),
        parent.rank(),
        ranks,
        dist.Backend(backend),
        default_store,
        name,  # type: ignore[arg-type]
        timeout=group_timeout(parent, device),
        group_desc="gradsync engine",
    )
    _world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(ranks)}
    assert isinstance(group, Group)
    return group
