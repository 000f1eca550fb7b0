"""A process group over several hosts: shared memory inside a host, gloo between the hosts.

The lowest rank of each host is its leader. All-reduce, broadcast, all-gather, reduce-scatter and barrier
cross the network once a host, through the leaders; the other operations and messages go through a gloo group
of all ranks. Everything here is composed of operations of those groups. It knows nothing of packets and
segments.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from gradsync.comm import arguments
from gradsync.comm.combine import Reduction, kernel_for, reduction_of
from gradsync.comm.python_group import Make, PythonGroup
from gradsync.comm.work import SLICE, is_over_within
from gradsync.errors import BackendError, GradsyncError

_torch: Any = dist  # for what torch's stubs leave out
_REASON_WAIT_S = 0.5  # how long a failed rank waits for others to say what they know


class MultiHostGroup(PythonGroup):
    """The ``shm`` backend where its ranks are on several hosts (made by torch.distributed)."""

    backend_name = "shm"

    def __init__(
        self,
        store: Any,
        rank: int,
        hosts: Sequence[str],
        make_local: Callable[[Any, int, list[int]], Any],
        timeout: timedelta,
    ) -> None:
        size = len(hosts)
        everybody = _torch.ProcessGroupGloo(_torch.PrefixStore("everybody", store), rank, size, timeout)
        super().__init__(store, rank, size, timeout, everybody)
        self._everybody = everybody
        names = list(dict.fromkeys(hosts))
        self._members = [[peer for peer in range(size) if hosts[peer] == name] for name in names]
        self._host = names.index(hosts[rank])
        self._local_rank = self._members[self._host].index(rank)
        self.local = make_local(
            _torch.PrefixStore(f"host-{self._host}", store), self._local_rank, self._members[self._host]
        )
        self._leaders: Any = None
        if self._local_rank == 0:
            store_of_leaders = _torch.PrefixStore("leaders", store)
            self._leaders = _torch.ProcessGroupGloo(store_of_leaders, self._host, len(names), timeout)
        self._failure: GradsyncError | None = None

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of zeros in the memory that the ranks of this host share."""
        return self.local.allocate(numel, dtype)  # type: ignore[no-any-return]

    def shutdown(self) -> None:
        """Leave the group; what is still running fails."""
        self.local.shutdown()
        self.executor.close()
        self._leaders = None

    def abort(self) -> None:
        """Leave the group at once and make every peer on this host fail."""
        self.local.abort()
        self.shutdown()

    def give_up(self, reason: GradsyncError) -> None:
        """Make everything fail for this reason on this host; the others see that its leader has gone."""
        self._failure = self._failure or reason
        self.local.give_up(reason)

    # -- operations through the leaders

    def _make_all_reduce(self, tensor: Tensor, op: Any, timeout_s: float) -> Make:
        reduction = reduction_of(op)
        kernel_for(reduction, tensor.dtype)  # refuses what makes no sense
        is_average = reduction is Reduction.AVG
        partial_op = ReduceOp.SUM if is_average else op

        def run(timeout: timedelta) -> None:
            self._reduce_everywhere(tensor, partial_op, timeout)
            if is_average:
                tensor.div_(self._num_ranks)

        return self._composed("all_reduce", run, timeout_s)

    def _make_broadcast(self, tensor: Tensor, root: int, timeout_s: float) -> Make:
        def run(timeout: timedelta) -> None:
            self._broadcast(_bytes(tensor), root, timeout)

        return self._composed("broadcast", run, timeout_s)

    def _make_all_gather(self, outputs: list[Tensor], tensor: Tensor, timeout_s: float) -> Make:
        def run(timeout: timedelta) -> None:
            own = _bytes(tensor)
            for members in self._members:
                block = own.new_empty((len(members), own.numel()))
                if self._own_rank in members:
                    self.local.all_gather_single(block, own, timeout=timeout).wait()
                self._broadcast(block, members[0], timeout)
                for member, part in zip(members, block.unbind(), strict=True):
                    _bytes(outputs[member]).copy_(part)

        return self._composed("all_gather", run, timeout_s)

    def _make_reduce_scatter(self, output: Tensor, tensors: list[Tensor], op: Any, timeout_s: float) -> Make:
        reduction = reduction_of(op)
        kernel_for(reduction, output.dtype)
        is_average = reduction is Reduction.AVG
        partial_op = ReduceOp.SUM if is_average else op

        def run(timeout: timedelta) -> None:
            whole = torch.stack([each.reshape(-1) for each in tensors])
            self._reduce_everywhere(whole, partial_op, timeout)
            output.copy_(whole[self._own_rank].view_as(output))
            if is_average:
                output.div_(self._num_ranks)

        return self._composed("reduce_scatter", run, timeout_s)

    def _make_barrier(self, timeout_s: float) -> Make:
        def run(timeout: timedelta) -> None:
            self._reduce_everywhere(torch.zeros(1), ReduceOp.SUM, timeout)

        return self._composed("barrier", run, timeout_s)

    # -- operations through the group of all ranks

    def _make_reduce(self, tensor: Tensor, root: int, op: Any, timeout_s: float) -> Make:
        opts = dist.ReduceOptions()
        opts.reduceOp, opts.rootRank = op, root
        return self._through_gloo("reduce", lambda: self._everybody.reduce([tensor], opts), opts, timeout_s)

    def _make_gather(self, outputs: list[Tensor], tensor: Tensor, root: int, timeout_s: float) -> Make:
        opts = dist.GatherOptions()
        opts.rootRank = root
        lists = [outputs] if outputs else []
        return self._through_gloo("gather", lambda: self._everybody.gather(lists, [tensor], opts), opts, timeout_s)

    def _make_scatter(self, output: Tensor, tensors: list[Tensor], root: int, timeout_s: float) -> Make:
        opts = dist.ScatterOptions()
        opts.rootRank = root
        lists = [tensors] if tensors else []
        return self._through_gloo("scatter", lambda: self._everybody.scatter([output], lists, opts), opts, timeout_s)

    def _make_all_to_all(self, outputs: list[Tensor], tensors: list[Tensor], timeout_s: float) -> Make:
        opts = dist.AllToAllOptions()
        return self._through_gloo(
            "all_to_all", lambda: self._everybody.alltoall(outputs, tensors, opts), opts, timeout_s
        )

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """Send a tensor to a rank of the group."""
        tensor = arguments.contiguous(arguments.single(tensors, "send"))
        self._num_messages += 1
        return self._everybody.send([tensor], peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """Receive a tensor from a rank of the group."""
        self._num_messages += 1
        return self._everybody.recv([arguments.single(tensors, "recv")], peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive a tensor from whichever rank sends first."""
        self._num_messages += 1
        return self._everybody.recv_anysource([arguments.single(tensors, "recv")], tag)

    # -- building blocks

    def _reduce_everywhere(self, tensor: Tensor, op: Any, timeout: timedelta) -> None:
        """Reduce inside each host, then between the leaders, then hand the result to everybody."""
        self.local.allreduce([tensor], op, timeout).wait()
        if self._leaders is not None:
            opts = _timed(dist.AllreduceOptions(), timeout)
            opts.reduceOp = op
            # gloo knows no complex numbers; only sums of them come here
            self._await(self._leaders.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor], opts))
        self.local.broadcast([tensor], root=0, timeout=_after_leaders(timeout)).wait()

    def _broadcast(self, data: Tensor, root: int, timeout: timedelta) -> None:
        """Hand out inside the host of the root, then between the leaders, then inside the other hosts."""
        host = next(host for host, members in enumerate(self._members) if root in members)
        if host == self._host:
            local_root = self._members[host].index(root)
            self.local.broadcast([data], root=local_root, timeout=timeout).wait()
        if self._leaders is not None:
            opts = _timed(dist.BroadcastOptions(), timeout)
            opts.rootRank = host
            self._await(self._leaders.broadcast([data], opts))
        if host != self._host:
            self.local.broadcast([data], root=0, timeout=_after_leaders(timeout)).wait()

    def _await(self, work: Any) -> None:
        """Wait for a work of gloo's, which nobody can interrupt, unless this host gives the group up."""
        while not is_over_within(work, SLICE):
            if self._failure is not None:
                raise self._failure
        work.wait()

    def _composed(self, name: str, run: Callable[[timedelta], None], timeout_s: float) -> Make:
        return lambda sequence: _Composed(self, f"{name} number {sequence}", run, timeout_s)

    def _through_gloo(self, name: str, issue: Callable[[], Any], opts: Any, timeout_s: float) -> Make:
        _timed(opts, timedelta(seconds=timeout_s))
        return self._composed(name, lambda timeout: self._await(issue()), timeout_s)

    # -- failure

    def check(self, what: str) -> None:
        """Raise if the group has failed before."""
        if self._failure is not None:
            raise BackendError(f"{what} cannot run: the group has failed before: {self._failure}")

    def _fail(self, what: str, error: BaseException) -> GradsyncError:
        """End the group on this host, and leave the reason in the store for other hosts."""
        if self._failure is None:
            self._failure = self._explain(what, error)
            self._store.set(f"failure/{self._host}", str(self._failure))
            self.local.give_up(self._failure)
            self._leaders = None  # closes the connections, so that other hosts see it too
        return self._failure

    def _explain(self, what: str, error: BaseException) -> GradsyncError:
        if isinstance(error, GradsyncError):
            return error
        time.sleep(_REASON_WAIT_S)
        others = [host for host in range(len(self._members)) if host != self._host]
        for key in (f"failure/{host}" for host in others):
            if self._store.check([key]):
                reason = self._store.get(key).decode()
                return BackendError(
                    f"another host gave up while rank {self._own_rank} was in {what}; its reason: {reason}"
                )
        ranks = ", ".join(str(rank) for host in others for rank in self._members[host])
        return BackendError(
            f"{what} failed between the hosts, seen by rank {self._own_rank}: {error}; the ranks on other "
            f"hosts ({ranks}) are late, have ended, or cannot be reached"
        )


class _Composed:
    """An operation that consists of operations of other groups."""

    def __init__(self, group: MultiHostGroup, name: str, run: Callable[[timedelta], None], timeout_s: float) -> None:
        self.name = name
        self._group = group
        self._run = run
        self._timeout = timedelta(seconds=timeout_s)

    def start(self) -> bool:
        self._group.check(self.name)
        return False

    def finish(self) -> None:
        self._group.check(self.name)
        try:
            with torch.no_grad():
                self._run(self._timeout)
        except BaseException as error:
            failure = self._group._fail(self.name, error)
            if failure is error or not isinstance(error, Exception):
                raise
            raise failure from error


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as a flat tensor of a dtype that gloo can move."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _after_leaders(timeout: timedelta) -> timedelta:
    """The timeout of what waits for a leader, which itself may wait for other hosts and then tells why it "
    "gave up."""
    return 2 * timeout + timedelta(seconds=5)


def _timed(opts: Any, timeout: timedelta) -> Any:
    opts.timeout = timeout
    return opts
