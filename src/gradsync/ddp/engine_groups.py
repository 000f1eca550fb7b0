"""The process groups that one reducer's collectives run on.

The reducer of CPU parameters has a private group for everything. With parameters on a GPU the buckets use the
user's group, since another NCCL communicator costs memory there, and a private gloo group carries the control words.
"""

import torch

from gradsync.comm.groups import Group
from gradsync.comm.private import Lease, borrow_group


class EngineGroups:
    """``buckets`` carries gradients and buffers, ``control`` (CPU tensors) everything else; they may be one.

    The copy of a wrapper cannot ask the other ranks for groups of its own, since it may be made on one rank alone;
    it uses those of its original until ``make_private``, which all ranks reach together.
    """

    def __init__(self, parent: Group, device: torch.device, original: "EngineGroups | None" = None) -> None:
        self._parent = parent
        self._device = device
        self._lease: Lease | None = None
        self._is_shared = original is not None
        self.buckets: Group = parent
        self.control: Group = parent
        if original is not None:
            self.buckets, self.control, self._lease = original.buckets, original.control, original._lease
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

    def _borrow(self) -> None:
        if self._parent.size() == 1:
            return
        is_cpu = self._device.type == "cpu"
        self._lease = borrow_group(self._parent, self._device, None if is_cpu else "gloo")
        self.control = self._lease.group
        if is_cpu:
            self.buckets = self._lease.group
