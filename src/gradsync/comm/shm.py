"""The ``shm`` backend: a process group whose ranks share the memory of one Linux host.

``register()`` makes it known to torch.distributed; from then on any program can ask for it by name. This
module says what each operation exchanges; how it travels is in ``shm_collectives`` and ``shm_messages``, the
parts they use in ``channel``, ``wire``, ``segment`` and ``meeting``. See docs/process-groups.md.
"""

import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm import arguments
from gradsync.comm.channel import Channel, Label, label
from gradsync.comm.combine import NO_BYTES, Bytes, kernel_for, reduction_of
from gradsync.comm.meeting import Meeting, exchange_hosts, meet, telling_absence
from gradsync.comm.multihost import MultiHostGroup
from gradsync.comm.python_group import Make, PythonGroup
from gradsync.comm.segment import Segment, default_reserve_bytes
from gradsync.comm.shm_all_reduce import EagerAllReduce, LargeAllReduce
from gradsync.comm.shm_collectives import (
    EagerExchange,
    Exchange,
    Publication,
    Reduced,
    StreamExchange,
)
from gradsync.comm.shm_messages import Messages, MessageWork
from gradsync.comm.wire import EAGER_BYTES, Wire
from gradsync.errors import BackendError, GradsyncError

NAME = "shm"
_torch: Any = dist  # for what torch's stubs leave out
_SPIN_S = 100e-6
_EAGER_TOTAL_BYTES = 128 * 1024  # what one rank sends to all others inside packets, at most


def register() -> None:
    """Make ``shm`` known to torch.distributed as a backend for CPU tensors (again: no effect)."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def is_available() -> str | None:
    """None if this platform can run the backend, else the reason why it cannot."""
    if not sys.platform.startswith("linux"):
        return f"shared memory between processes needs Linux (memfd, UNIX sockets); this is {sys.platform}"
    missing = [name for name in ("memfd_create", "eventfd") if not hasattr(os, name)]
    if missing:
        return f"this Python was built without {' and '.join(missing)}"
    try:
        os.close(os.memfd_create("gradsync-probe"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.bind("")
    except OSError as error:
        return f"the system refuses shared memory or UNIX sockets: {error}"
    return None


class ShmGroup(PythonGroup):
    """A process group over shared memory (made by torch.distributed, see ``register``)."""

    backend_name = NAME

    def __init__(
        self,
        store: Any,
        rank: int,
        global_ranks: Sequence[int],
        timeout: timedelta,
        reserve_bytes: int | None = None,
    ) -> None:
        size = len(global_ranks)
        meeting_store = _torch.PrefixStore("shm", store)
        with telling_absence(meeting_store, rank, f"rank {global_ranks[rank]}"):
            super().__init__(store, rank, size, timeout, _loopback_gloo(store, rank, size, timeout))
            segment = Segment(reserve_bytes or default_reserve_bytes(size))
            try:
                meeting = meet(meeting_store, rank, size, segment, timeout) if size > 1 else Meeting()
            finally:
                segment.close_descriptor()
            wire, message_wire = _wires(meeting, _SPIN_S if _has_core_for_each(size) else 0.0)
        self._channel = Channel(rank, global_ranks, wire, segment, meeting.memory)
        self._channel.wires.append(message_wire)
        self._messages = Messages(self._channel, message_wire)
        self._eager_bytes = min(EAGER_BYTES, _EAGER_TOTAL_BYTES // max(size - 1, 1))
        # At the end of a process that does not destroy its groups (also one started by multiprocessing, which
        # does not run atexit): a goodbye, so that peers do not take it for a death.
        self._finalizer = Finalize(self, self._channel.say_goodbye, exitpriority=10)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of zeros in the memory that the ranks share.

        ``allreduce`` of such tensors (or slices of them) on all ranks reads and writes them in place, without
        a copy. The memory is given back when the last view of the tensor dies.
        """
        return self._channel.segment.allocate(numel, dtype)

    def shutdown(self) -> None:
        """Leave the group; what is still running fails."""
        self._finalizer.cancel()
        self._channel.say_goodbye()
        self.executor.close()
        self._messages.close()
        self._channel.close()

    def abort(self) -> None:
        """Leave the group at once and make every peer fail."""
        who = self._channel.name_of([self._own_rank])
        self.give_up(BackendError(f"{who} has aborted the group"))
        self.shutdown()

    def give_up(self, reason: GradsyncError) -> None:
        """Make everything fail for this reason, here and on every peer."""
        self._channel.fail("abort", reason)

    # -- messages

    def send(self, tensors: Any, peer: int, tag: int = 0) -> MessageWork:
        """Send a tensor to a rank of the group."""
        tensor = arguments.single(tensors, "send")
        self._num_messages += 1
        name = f"send to {self._channel.name_of([peer])} with tag {tag}"
        data = self._channel.bytes_of(arguments.contiguous(tensor))
        return self._messages.send(MessageWork(name, [tensor], data, peer, tag, self._timeout_s))

    def recv(self, tensors: Any, peer: int | None, tag: int = 0) -> MessageWork:
        """Receive a tensor from a rank of the group (None: from whichever sends first)."""
        tensor = arguments.single(tensors, "recv")
        self._num_messages += 1
        flat = arguments.contiguous(tensor)
        who = "any rank" if peer is None else self._channel.name_of([peer])
        name = f"receive from {who} with tag {tag}"
        work = MessageWork(name, [tensor], self._channel.bytes_of(flat), peer, tag, self._timeout_s)
        if flat is not tensor:
            work.after = lambda: _copy_back(flat, tensor)
        return self._messages.receive(work)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MessageWork:
        """Receive a tensor from whichever rank sends first."""
        return self.recv(tensors, None, tag)

    # -- what each operation exchanges

    def _make_all_reduce(self, tensor: Tensor, op: Any, timeout_s: float) -> Make:
        channel, reduction = self._channel, reduction_of(op)
        kernel = kernel_for(reduction, tensor.dtype)
        name = label("all_reduce", tensor.dtype, reduction)
        data = channel.bytes_of(tensor)
        is_small = data.size <= self._eager_bytes or not channel.peers
        kind = EagerAllReduce if is_small else LargeAllReduce
        return lambda sequence: kind(channel, name, sequence, timeout_s, data, kernel)

    def _make_broadcast(self, tensor: Tensor, root: int, timeout_s: float) -> Make:
        data = self._channel.bytes_of(tensor)
        if root == self._own_rank:
            exchange = Exchange([Publication(data, self._channel.peers)])
        else:
            exchange = Exchange([], {root: data.size}, {root: data})
        return self._exchange(label("broadcast", tensor.dtype, root=root), exchange, data.size, timeout_s)

    def _make_reduce(self, tensor: Tensor, root: int, op: Any, timeout_s: float) -> Make:
        channel, reduction = self._channel, reduction_of(op)
        kernel = kernel_for(reduction, tensor.dtype)
        data = channel.bytes_of(tensor)
        if root == self._own_rank:
            exchange = Exchange([], dict.fromkeys(channel.peers, data.size), reduced=Reduced(kernel, data, data))
        else:
            exchange = Exchange([Publication(data, [root])])
        return self._exchange(label("reduce", tensor.dtype, reduction, root), exchange, data.size, timeout_s)

    def _make_all_gather(self, outputs: list[Tensor], tensor: Tensor, timeout_s: float) -> Make:
        channel = self._channel
        data, targets = channel.bytes_of(tensor), [channel.bytes_of(output) for output in outputs]
        exchange = Exchange(
            [Publication(data, channel.peers)],
            {peer: targets[peer].size for peer in channel.peers},
            {peer: targets[peer] for peer in channel.peers},
            after=lambda: _copy(data, targets[self._own_rank]),
        )
        return self._exchange(label("all_gather", tensor.dtype), exchange, data.size, timeout_s)

    def _make_gather(self, outputs: list[Tensor], tensor: Tensor, root: int, timeout_s: float) -> Make:
        channel = self._channel
        data = channel.bytes_of(tensor)
        exchange = Exchange([Publication(data, [root])])
        if root == self._own_rank:
            targets = [channel.bytes_of(output) for output in outputs]
            exchange = Exchange(
                [],
                {peer: targets[peer].size for peer in channel.peers},
                {peer: targets[peer] for peer in channel.peers},
                after=lambda: _copy(data, targets[root]),
            )
        return self._exchange(label("gather", tensor.dtype, root=root), exchange, data.size, timeout_s)

    def _make_scatter(self, output: Tensor, tensors: list[Tensor], root: int, timeout_s: float) -> Make:
        channel = self._channel
        target = channel.bytes_of(output)
        exchange = Exchange([], {root: target.size}, {root: target})
        if root == self._own_rank:
            sources = [channel.bytes_of(tensor) for tensor in tensors]
            exchange = Exchange(
                [Publication(sources[peer], [peer]) for peer in channel.peers],
                after=lambda: _copy(sources[root], target),
            )
        return self._exchange(label("scatter", output.dtype, root=root), exchange, target.size, timeout_s)

    def _make_reduce_scatter(self, output: Tensor, tensors: list[Tensor], op: Any, timeout_s: float) -> Make:
        channel, reduction = self._channel, reduction_of(op)
        kernel = kernel_for(reduction, output.dtype)
        sources, target = [channel.bytes_of(tensor) for tensor in tensors], channel.bytes_of(output)
        exchange = Exchange(
            [Publication(sources[peer], [peer]) for peer in channel.peers],
            dict.fromkeys(channel.peers, target.size),
            reduced=Reduced(kernel, sources[self._own_rank], target),
        )
        return self._exchange(label("reduce_scatter", output.dtype, reduction), exchange, target.size, timeout_s)

    def _make_all_to_all(self, outputs: list[Tensor], tensors: list[Tensor], timeout_s: float) -> Make:
        channel = self._channel
        sources = [channel.bytes_of(tensor) for tensor in tensors]
        targets = [channel.bytes_of(output) for output in outputs]
        exchange = Exchange(
            [Publication(sources[peer], [peer]) for peer in channel.peers],
            {peer: targets[peer].size for peer in channel.peers},
            {peer: targets[peer] for peer in channel.peers},
            after=lambda: _copy(sources[self._own_rank], targets[self._own_rank]),
        )
        # Ranks cannot know how much others exchange among themselves, so the way is the same for every size.
        num_bytes = self._eager_bytes + 1
        return self._exchange(label("all_to_all", tensors[0].dtype), exchange, num_bytes, timeout_s)

    def _make_barrier(self, timeout_s: float) -> Make:
        channel = self._channel
        exchange = Exchange([Publication(NO_BYTES, channel.peers)], dict.fromkeys(channel.peers, 0))
        return self._exchange(label("barrier"), exchange, 0, timeout_s)

    def _exchange(self, name: Label, exchange: Exchange, num_bytes: int, timeout_s: float) -> Make:
        """An exchange in the way that suits its size; ``num_bytes`` must be equal on all ranks."""
        is_small = num_bytes <= self._eager_bytes or not self._channel.peers
        kind = EagerExchange if is_small else StreamExchange
        return lambda sequence: kind(self._channel, name, sequence, timeout_s, exchange)


def _copy_back(flat: Tensor, tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(flat)


def _copy(source: Bytes, target: Bytes) -> None:
    if source.ctypes.data != target.ctypes.data:  # an output often holds this rank's input already
        np.copyto(target, source)


def _create(options: Any, _backend_options: Any) -> PythonGroup:
    """What torch.distributed calls to make a group."""
    global_ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    with telling_absence(options.store, options.group_rank, f"rank {global_ranks[options.group_rank]}"):
        reason = is_available()
        if reason is not None:
            raise BackendError(f"the shm backend cannot run here: {reason}; use gloo")
        hosts = exchange_hosts(options.store, options.group_rank, options.group_size, options.timeout)
        if len(set(hosts)) == 1:
            return ShmGroup(options.store, options.group_rank, global_ranks, options.timeout)

        def make_local(store: Any, rank: int, members: list[int]) -> ShmGroup:
            return ShmGroup(store, rank, [global_ranks[member] for member in members], options.timeout)

        return MultiHostGroup(options.store, options.group_rank, hosts, make_local, options.timeout)


def _wires(meeting: Meeting, spin_s: float) -> tuple[Wire, Wire]:
    """The wire of the operations and that of the messages; nobody is left waiting for them if they cannot be made."""
    try:
        return Wire(meeting.sockets, spin_s), Wire(meeting.message_sockets, 0.0)
    except BaseException:
        meeting.close()
        raise


def _has_core_for_each(size: int) -> bool:
    return size <= len(os.sched_getaffinity(0))


def _loopback_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The inner group (see ``python_group``); all ranks are on this host, so the loopback device serves."""
    options = _torch.ProcessGroupGloo._Options()
    options._devices = [_torch.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)]
    options._timeout = timeout
    return _torch.ProcessGroupGloo(_torch.PrefixStore("gloo", store), rank, size, options)
