"""The two collectives of a sharded optimizer: sum and keep one's slice, and give one's slice to all.

A flat tensor is cut into slices of equal length, one a rank. Backends differ in how well they do this, so
there are three ways; ``choose_exchange`` picks one. Knows nothing of parameters.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradsync.comm.groups import Group
from gradsync.comm.summing import Pending, is_gloo


class Exchange(Protocol):
    """One way to do both; ``tag`` is equal on all ranks, and unique among what is on its way.

    Slices have the length of ``out``, or ``slice_numel``.
    """

    takes_any_length: bool
    """Whether the last slices may be shorter, or empty."""

    def reduce_scatter(self, whole: torch.Tensor, out: torch.Tensor, tag: int) -> Pending:
        """Start to sum ``whole`` over the ranks and to put this rank's slice into ``out``, there after the wait."""

    def all_gather(self, whole: torch.Tensor, slice_numel: int, tag: int) -> Sequence[Any]:
        """Start to fill ``whole`` with every rank's slice of it; returns works to wait for."""


def choose_exchange(group: Group, device: torch.device) -> Exchange:
    """Return the best way for this group and this kind of device."""
    if is_gloo(group, device):
        return PairwiseExchange(group) if device.type == "cpu" else AllReduceExchange(group)
    return NativeExchange(group)


class NativeExchange:
    """The backend's own operations (NCCL, shm)."""

    takes_any_length = False

    def __init__(self, group: Group) -> None:
        self._group = group

    def reduce_scatter(self, whole: torch.Tensor, out: torch.Tensor, tag: int) -> Pending:
        """See ``Exchange``."""
        return _Whole(self._group._reduce_scatter_base(out, whole, dist.ReduceScatterOptions()), whole)

    def all_gather(self, whole: torch.Tensor, slice_numel: int, tag: int) -> Sequence[Any]:
        """See ``Exchange``."""
        mine = slice_of(whole, slice_numel, self._group.rank())
        return [self._group._allgather_base(whole, mine)]


class AllReduceExchange:
    """All-reduce and keep the slice, broadcast from each owner: for gloo with tensors on a GPU."""

    takes_any_length = True

    def __init__(self, group: Group) -> None:
        self._group = group

    def reduce_scatter(self, whole: torch.Tensor, out: torch.Tensor, tag: int) -> Pending:
        """See ``Exchange``."""
        total = whole.clone()
        mine = slice_of(total, out.numel(), self._group.rank())
        return _Whole(self._group.allreduce([total]), total, mine, out)

    def all_gather(self, whole: torch.Tensor, slice_numel: int, tag: int) -> Sequence[Any]:
        """See ``Exchange``."""
        works = []
        for rank in range(self._group.size()):
            part = slice_of(whole, slice_numel, rank)
            if part.numel():
                options = dist.BroadcastOptions()
                options.rootRank, options.rootTensor = rank, 0
                works.append(self._group.broadcast([part], options))
        return works


class _Whole:
    """One operation on the whole tensor, of which a part may have to be copied out in the end."""

    def __init__(
        self, work: Any, whole: torch.Tensor, mine: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> None:
        self._work = work
        self._whole = whole
        self._mine = mine
        self._out = out

    def wait(self) -> None:
        self._work.wait()
        if self._mine is not None and self._out is not None:
            self._out[: self._mine.numel()].copy_(self._mine)


class PairwiseExchange:
    """Every rank sends to every other what that one needs, in one step: for gloo on the CPU.

    gloo's own reduce-scatter takes twice as long as its all-reduce; this takes half as long. Slices are added
    in rank order, so that every run gives the same bits.
    """

    takes_any_length = True

    def __init__(self, group: Group) -> None:
        self._group = group
        self._rank, size = group.rank(), group.size()
        self._peers = [rank for rank in range(size) if rank != self._rank]

    def reduce_scatter(self, whole: torch.Tensor, out: torch.Tensor, tag: int) -> Pending:
        """See ``Exchange``."""
        mine = slice_of(whole, out.numel(), self._rank)
        theirs = {}
        if mine.numel():
            theirs = {peer: torch.empty_like(mine) for peer in self._peers[1:]}
            theirs[self._peers[0]] = out[: mine.numel()]
        works = [self._group.recv([part], peer, tag) for peer, part in theirs.items()]
        for peer in self._peers:
            part = slice_of(whole, out.numel(), peer)
            if part.numel():
                works.append(self._group.send([part], peer, tag))
        return _Parts({self._rank: mine, **theirs}, out, works)

    def all_gather(self, whole: torch.Tensor, slice_numel: int, tag: int) -> Sequence[Any]:
        """See ``Exchange``."""
        parts = {peer: slice_of(whole, slice_numel, peer) for peer in self._peers}
        mine = slice_of(whole, slice_numel, self._rank)
        works = [self._group.recv([part], peer, tag) for peer, part in parts.items() if part.numel()]
        if mine.numel():
            works += [self._group.send([mine], peer, tag) for peer in self._peers]
        return works


class _Parts:
    """One part a rank, this rank's own among them; the first of the others lies where the sum goes."""

    def __init__(self, parts: dict[int, torch.Tensor], out: torch.Tensor, works: Sequence[Any]) -> None:
        self._parts = [parts[rank] for rank in sorted(parts)]
        self._out = out
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        total, *rest = self._parts
        for part in rest:
            total = torch.add(total, part, out=self._out[: part.numel()])


def slice_of(whole: torch.Tensor, slice_numel: int, rank: int) -> torch.Tensor:
    """Return the rank's slice of a flat tensor, which may end before or in it."""
    return whole[rank * slice_numel : (rank + 1) * slice_numel]
