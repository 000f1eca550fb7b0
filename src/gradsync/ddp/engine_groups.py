"""The process groups that one reducer's collectives run on.

The reducer of CPU parameters has a private group for everything. With parameters on a GPU the buckets use the
user's group, since another NCCL communicator costs memory there, and a private gloo group carries the control words.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch

from gradsync.comm import last_words
from gradsync.comm.groups import Group
from gradsync.comm.private import Lease, borrow_group
from gradsync.comm.summing import Pending, choose_sum
from gradsync.comm.waits import Waits
from gradsync.comm.watches import watch_of_world
from gradsync.ddp.bucket import allocate_zeros


class EngineGroups:
    """``buckets`` carries gradients and buffers, ``control`` (CPU tensors) everything else; they may be one.

    The copy of a wrapper cannot ask the other ranks for groups of its own, since it may be made on one rank alone;
    it uses those of its original until ``make_private``, which all ranks reach together.
    """

    def __init__(
        self,
        parent: Group,
        device: torch.device,
        original: "EngineGroups | None" = None,
        soft_limit_s: float | None = None,
    ) -> None:
        self._parent = parent
        self._device = device
        self._soft_limit_s = soft_limit_s
        self._lease: Lease | None = None
        self._is_shared = original is not None
        self.is_on_host = device.type == "cpu"
        """Whether collectives of buckets are over when the host has waited for them."""
        self.buckets: Group = parent
        self.control: Group = parent
        if original is not None:
            self.buckets, self.control, self._lease = original.buckets, original.control, original._lease
            self._choose_sums()
        else:
            self._borrow()

    def make_private(self) -> None:
        """Leave groups that are shared with another reducer; collective where they are."""
        if self._is_shared:
            self._borrow()
            self._is_shared = False

    def spoil(self) -> None:
        """Keep the groups from being used by anyone else: a collective on them has failed."""
        if self._lease is not None:
            self._lease.spoil()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return zeroed memory for gradients: where the peers can read it, if the group has such memory."""
        if self.share_memory(device):
            return cast("torch.Tensor", self.buckets.allocate(numel, dtype))  # type: ignore[attr-defined]
        return allocate_zeros(numel, dtype, device)

    def share_memory(self, device: torch.device) -> bool:
        """Whether the group has memory that all its ranks can read, for tensors on this device."""
        return device.type == "cpu" and hasattr(self.buckets, "allocate")

    def sum_bucket(self, flat: torch.Tensor, is_awaited: bool) -> Pending:
        """Start to sum a flat tensor of gradients over the ranks, in place."""
        return self._sum_bucket(flat, is_awaited)

    def sum_words(self, flat: torch.Tensor) -> Pending:
        """Start to sum a flat CPU tensor over the ranks, in place; the caller is about to wait for it."""
        return self._sum_words(flat, True)

    def wait_for_bucket(self, pending: Pending, number: int) -> None:
        """Wait for the sum of a bucket; see ``Waits.wait`` for what it raises."""
        self.waits.wait(pending, number)

    def wait_for_messages(self, works: Sequence[Any]) -> None:
        """Wait for works of the buckets' group that may be messages from rank to rank."""
        if self.is_on_host:
            self.waits.wait_for_messages(works)
        else:  # nobody but this thread may wait for a device
            for work in works:
                self.waits.wait(work)

    def wait_for_words(self, pending: Pending) -> None:
        """Wait for the sum of control words."""
        self._word_waits.wait(pending)

    def _choose_sums(self) -> None:
        last_words.install()
        watch = watch_of_world()
        self.waits = Waits(self.buckets, watch, self._soft_limit_s)
        self._word_waits = Waits(self.control, watch, self._soft_limit_s)
        self._sum_bucket = choose_sum(self.buckets, self._device)
        self._sum_words = choose_sum(self.control, torch.device("cpu"))

    def _borrow(self) -> None:
        if self._parent.size() > 1:
            self._take_lease()
        self._choose_sums()

    def _take_lease(self) -> None:
        is_cpu = self._device.type == "cpu"
        self._lease = borrow_group(self._parent, self._device, None if is_cpu else "gloo")
        self.control = self._lease.group
        if is_cpu:
            self.buckets = self._lease.group
