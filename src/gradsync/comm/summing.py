"""Starting a sum over the ranks of a group, the quickest way that the backend has for its size.

gloo's all-reduce takes two steps at least: the ranks exchange parts, and then what became of them. For few numbers
the steps are all that counts, so every rank gets all ranks' numbers in one step and adds them up itself, in rank
order, which gives the same bits everywhere. Other backends know how to do that themselves.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradsync.comm.groups import Group

_SMALL_BYTES = 64 * 1024
_FEW_RANKS = 4


class Pending(Protocol):
    """A sum on its way."""

    def wait(self) -> object:
        """Return when the sum is in place."""


Sum = Callable[[torch.Tensor, bool], Pending]
"""Starts to sum a flat tensor over the ranks, in place; True says that the caller is about to wait for it."""


def choose_sum(group: Group, device: torch.device) -> Sum:
    """Return the quickest sum for this group and this kind of device."""
    options = dist.AllreduceOptions()
    options.asyncOp = device.type != "cpu"

    def all_reduce(flat: torch.Tensor, is_awaited: bool) -> Pending:
        # Of a group written in Python the one who waits does the work himself, unless a thread was woken for it.
        return group.allreduce([flat], options) if is_awaited else group.allreduce([flat])

    def gather_if_small(flat: torch.Tensor, is_awaited: bool) -> Pending:
        return _GatheredSum(group, flat) if flat.nbytes <= _SMALL_BYTES else all_reduce(flat, is_awaited)

    is_small_group = 1 < group.size() <= _FEW_RANKS
    return gather_if_small if device.type == "cpu" and is_small_group and is_gloo(group, device) else all_reduce


def is_gloo(group: Group, device: torch.device) -> bool:
    """Whether torch's gloo runs the group's operations; a group written in Python only has one inside."""
    return type(group) is dist.ProcessGroup and isinstance(group._get_backend(device), dist.ProcessGroupGloo)


class _GatheredSum:
    """The numbers of all ranks on their way to every rank, and their sum."""

    def __init__(self, group: Group, flat: torch.Tensor) -> None:
        self._flat = flat
        self._gathered = flat.new_empty(group.size() * flat.numel())
        self._work: Any = group._allgather_base(self._gathered, flat)

    def is_completed(self) -> bool:
        """Whether all numbers are here."""
        return self._work is None or bool(self._work.is_completed())

    def get_future(self) -> Any:
        """A future of their arrival."""
        return None if self._work is None else self._work.get_future()

    def wait(self, limit: timedelta | None = None) -> None:
        """See ``Pending``; a second call does nothing. With a limit: raise if it is not complete by then, and go on."""
        if self._work is None:
            return
        if limit is None:
            self._work.wait()
        else:
            self._work.wait(limit)
        self._work = None
        first, second, *rest = self._gathered.view(-1, self._flat.numel()).unbind()
        torch.add(first, second, out=self._flat)
        for row in rest:
            self._flat.add_(row)
