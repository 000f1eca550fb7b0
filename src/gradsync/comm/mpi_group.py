"""The process group over MPI: what each operation asks of it, and what is left when one fails.

Made by torch.distributed, see ``mpi``. Importing this module starts MPI.
"""

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from gradsync.comm import arguments
from gradsync.comm.combine import Reduction, reduction_of
from gradsync.comm.meeting import telling_absence
from gradsync.comm.mpi_meeting import Members, meet
from gradsync.comm.mpi_messages import Messages, MessageWork
from gradsync.comm.mpi_requests import Notices, Waiter, has_abandoned
from gradsync.comm.mpi_types import moved, raw, reduction_op, side_by_side, typed
from gradsync.comm.python_group import Make, PythonGroup
from gradsync.errors import BackendError, ConfigError, GradsyncError

_torch: Any = dist  # for what torch's stubs leave out
_TAG_BITS = 0x3FFF

Post = Callable[[Any], Any]  # starts an operation on a communicator and returns its request


class MpiGroup(PythonGroup):
    """A process group whose operations are those of MPI."""

    backend_name = "mpi4py"

    def __init__(
        self, store: Any, rank: int, global_ranks: Sequence[int], timeout: timedelta, name: str = "default"
    ) -> None:
        meeting_store = _torch.PrefixStore("mpi", store)
        with telling_absence(meeting_store, rank, f"rank {global_ranks[rank]}"):
            members = meet(meeting_store, rank, global_ranks, timeout)
            super().__init__(store, rank, len(global_ranks), timeout, _inner_gloo(store, rank, members, timeout))
        self._global_ranks = list(global_ranks)
        # Collective over the members only, and only now that all of them are known to be here.
        chosen = MPI.COMM_WORLD.Get_group().Incl(members.mpi_ranks)
        self._comm: Any = MPI.COMM_WORLD.Create_group(chosen, zlib.crc32(name.encode()) & _TAG_BITS)
        chosen.Free()
        self._notices = Notices(_torch.PrefixStore("mpi", store), rank, len(global_ranks))
        self.waiter = Waiter(self._notices, members.num_on_this_host(rank))
        self._messages = Messages(self.give_up)
        self._failure: GradsyncError | None = None

    def shutdown(self) -> None:
        """Leave the group; what is still running fails."""
        if self._comm == MPI.COMM_NULL:
            return
        self.executor.close()
        self._messages.close()
        comm, self._comm = self._comm, MPI.COMM_NULL
        if self._failure is None and not has_abandoned():
            comm.Free()

    def abort(self) -> None:
        """Leave the group at once; peers that wait for this rank fail within seconds."""
        self.give_up(f"rank {self._own_rank} has aborted the group")
        self.shutdown()

    def give_up(self, reason: str | GradsyncError) -> GradsyncError:
        """Make everything fail for this reason, here and on the peers."""
        if self._failure is None:
            self._failure = BackendError(reason) if isinstance(reason, str) else reason
            self._messages.give_up(self._failure)
            self._notices.failed(self._failure)
        return self._failure

    def check(self, what: str) -> Any:
        """The communicator, if it is of any use.

        Raises:
            BackendError: the group has failed before, or was left.
        """
        if self._failure is not None:
            raise BackendError(f"{what} cannot run: the group has failed before: {self._failure}")
        if self._comm == MPI.COMM_NULL:
            raise BackendError(f"{what} cannot run: the group was left")
        return self._comm

    # -- messages

    def send(self, tensors: Any, peer: int, tag: int = 0) -> MessageWork:
        """Send a tensor to a rank of the group."""
        tensor = arguments.single(tensors, "send")
        self._num_messages += 1
        name = f"send to rank {self._global_ranks[peer]} with tag {tag}"
        data = raw(arguments.contiguous(tensor))
        request = self.check(name).Isend(moved(data), peer, _tag(tag))
        return self._messages.add(MessageWork(self._messages, name, [tensor], request, data, self._timeout_s))

    def recv(self, tensors: Any, peer: int | None, tag: int = 0) -> MessageWork:
        """Receive a tensor from a rank of the group (None: from whichever sends first)."""
        tensor = arguments.single(tensors, "recv")
        self._num_messages += 1
        flat = arguments.contiguous(tensor)
        who = "any rank" if peer is None else f"rank {self._global_ranks[peer]}"
        name, data = f"receive from {who} with tag {tag}", raw(flat)
        request = self.check(name).Irecv(moved(data), MPI.ANY_SOURCE if peer is None else peer, _tag(tag))
        work = MessageWork(self._messages, name, [tensor], request, data, self._timeout_s)
        if flat is not tensor:
            work.after = lambda: _copy(flat, tensor)
        return self._messages.add(work)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MessageWork:
        """Receive a tensor from whichever rank sends first."""
        return self.recv(tensors, None, tag)

    # -- what each operation asks of MPI

    def _make_all_reduce(self, tensor: Tensor, op: Any, timeout_s: float) -> Make:
        reduction = reduction_of(op)
        combine = reduction_op(reduction, tensor.dtype)
        return self._collective(
            f"all_reduce {reduction.name} of {tensor.dtype}",
            timeout_s,
            lambda comm: comm.Iallreduce(MPI.IN_PLACE, typed(tensor), combine),
            self._finished(tensor, reduction),
        )

    def _make_broadcast(self, tensor: Tensor, root: int, timeout_s: float) -> Make:
        return self._collective("broadcast", timeout_s, lambda comm: comm.Ibcast(moved(raw(tensor)), root))

    def _make_reduce(self, tensor: Tensor, root: int, op: Any, timeout_s: float) -> Make:
        reduction = reduction_of(op)
        combine = reduction_op(reduction, tensor.dtype)
        is_root = root == self._own_rank

        def post(comm: Any) -> Any:
            if is_root:
                return comm.Ireduce(MPI.IN_PLACE, typed(tensor), combine, root)
            return comm.Ireduce(typed(tensor), None, combine, root)

        after = self._finished(tensor, reduction) if is_root else None
        return self._collective(f"reduce {reduction.name} of {tensor.dtype}", timeout_s, post, after)

    def _make_all_gather(self, outputs: list[Tensor], tensor: Tensor, timeout_s: float) -> Make:
        data = raw(tensor)
        whole, after = _receiving(outputs)
        # a rank's input may already lie where it belongs in the output, which MPI wants to be told
        is_in_place = bool(data.size) and outputs[self._own_rank].data_ptr() == tensor.data_ptr() and after is None
        source = MPI.IN_PLACE if is_in_place else moved(data)
        target = [raw(whole), data.size, MPI.BYTE]
        return self._collective("all_gather", timeout_s, lambda comm: comm.Iallgather(source, target), after)

    def _make_gather(self, outputs: list[Tensor], tensor: Tensor, root: int, timeout_s: float) -> Make:
        data = raw(tensor)
        if root != self._own_rank:
            return self._collective("gather", timeout_s, lambda comm: comm.Igather(moved(data), None, root))
        whole = torch.empty(data.size * self._num_ranks, dtype=torch.uint8)
        target = [raw(whole), data.size, MPI.BYTE]
        return self._collective(
            "gather",
            timeout_s,
            lambda comm: comm.Igather(moved(data), target, root),
            lambda: _hand_out(whole, outputs),
        )

    def _make_scatter(self, output: Tensor, tensors: list[Tensor], root: int, timeout_s: float) -> Make:
        target = moved(raw(output))
        if root != self._own_rank:
            return self._collective("scatter", timeout_s, lambda comm: comm.Iscatter(None, target, root))
        source = [raw(_together(tensors)), output.nbytes, MPI.BYTE]
        return self._collective("scatter", timeout_s, lambda comm: comm.Iscatter(source, target, root))

    def _make_reduce_scatter(self, output: Tensor, tensors: list[Tensor], op: Any, timeout_s: float) -> Make:
        reduction = reduction_of(op)
        combine = reduction_op(reduction, output.dtype)
        whole = _together(tensors).view(output.dtype)
        # The output is often a slice of the inputs, and MPI wants them apart.
        result = torch.empty_like(output) if _overlap(output, whole) else output
        finish = self._finished(result, reduction)
        source = [raw(whole), *typed(result)[1:]]

        def after() -> None:
            if finish is not None:
                finish()
            if result is not output:
                _copy(result, output)

        return self._collective(
            f"reduce_scatter {reduction.name} of {output.dtype}",
            timeout_s,
            lambda comm: comm.Ireduce_scatter_block(source, typed(result), combine),
            after,
        )

    def _make_all_to_all(self, outputs: list[Tensor], tensors: list[Tensor], timeout_s: float) -> Make:
        send_sizes, receive_sizes = [each.nbytes for each in tensors], [each.nbytes for each in outputs]
        whole = torch.empty(sum(receive_sizes), dtype=torch.uint8)
        source = [raw(_together(tensors)), send_sizes, MPI.BYTE]
        target = [raw(whole), receive_sizes, MPI.BYTE]
        return self._collective(
            "all_to_all", timeout_s, lambda comm: comm.Ialltoallv(source, target), lambda: _hand_out(whole, outputs)
        )

    def _make_barrier(self, timeout_s: float) -> Make:
        return self._collective("barrier", timeout_s, lambda comm: comm.Ibarrier())

    def _collective(self, what: str, timeout_s: float, post: Post, after: Callable[[], None] | None = None) -> Make:
        return lambda sequence: _Collective(self, f"{what} number {sequence}", timeout_s, post, after)

    def _finished(self, tensor: Tensor, reduction: Reduction) -> Callable[[], None] | None:
        if reduction is not Reduction.AVG:
            return None

        def divide() -> None:
            with torch.no_grad():
                tensor.div_(self._num_ranks)

        return divide


class _Collective:
    """One MPI operation on this rank; all ranks start them in the same order, as MPI demands."""

    def __init__(
        self, group: MpiGroup, name: str, timeout_s: float, post: Post, after: Callable[[], None] | None
    ) -> None:
        self.name = name
        self._group = group
        self._timeout_s = timeout_s
        self._post = post
        self._after = after

    def start(self) -> bool:
        self._group.check(self.name)
        return False  # MPI moves nothing unless it is called, see [Note: Polling]

    def finish(self) -> None:
        comm = self._group.check(self.name)
        try:
            self._group.waiter.wait(self._post(comm), self.name, self._timeout_s, self)
        except MPI.Exception as error:
            raise self._group.give_up(f"{self.name} failed on rank {self._group.rank()}: {error}") from error
        except GradsyncError as error:
            raise self._group.give_up(error) from None
        except BaseException:  # an interrupt leaves MPI in the middle of the operation
            self._group.give_up(f"{self.name} was interrupted on rank {self._group.rank()}")
            raise
        if self._after is not None:
            self._after()


def _receiving(outputs: list[Tensor]) -> tuple[Tensor, Callable[[], None] | None]:
    """Memory for what comes from all ranks: that of the outputs, or a temporary one and how to hand it out."""
    whole = side_by_side(outputs)
    if whole is not None:
        return whole, None
    temporary = torch.empty(sum(output.nbytes for output in outputs), dtype=torch.uint8)
    return temporary, lambda: _hand_out(temporary, outputs)


def _together(tensors: list[Tensor]) -> Tensor:
    """The bytes of all tensors, one after the other; a copy only if they do not lie that way."""
    whole = side_by_side(tensors)
    return torch.cat([torch.from_numpy(raw(each)) for each in tensors]) if whole is None else whole


def _hand_out(whole: Tensor, outputs: list[Tensor]) -> None:
    for output, part in zip(outputs, torch.split(whole, [output.nbytes for output in outputs]), strict=True):
        torch.from_numpy(raw(output)).copy_(part)


def _copy(source: Tensor, target: Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


def _tag(tag: int) -> int:
    highest: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    if not 0 <= tag <= highest:
        raise ConfigError(f"tags of messages over MPI are numbers from 0 to {highest}, not {tag}")
    return tag


def _inner_gloo(store: Any, rank: int, members: Members, timeout: timedelta) -> Any:
    """The inner group (see ``python_group``); it connects only when somebody uses it."""
    options = _torch.ProcessGroupGloo._Options()
    if members.num_on_this_host(rank) == len(members.mpi_ranks):
        device = _torch.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)
    else:
        device = _torch.ProcessGroupGloo.create_default_device(lazy_init=True)
    options._devices = [device]
    options._timeout = timeout
    return _torch.ProcessGroupGloo(_torch.PrefixStore("gloo", store), rank, len(members.mpi_ranks), options)
