"""What every process group written in Python shares: torch's calling conventions, as nine plain operations.

``PythonGroup`` takes the many forms in which torch calls a group (lists of lists, options or plain arguments,
old and new names), checks the tensors, makes them contiguous, and asks its subclass for an ``Operation`` of
one plain kind. It runs them through an ``Executor``. It knows nothing of how data travels.

[Note: The inner group] torch reaches some operations of a group from C++ past the Python class (``reduce``
and ``gather`` called as operators, for instance) and asks for a backend by device. A gloo backend that
connects when it is first used answers there; nothing that ``torch.distributed`` offers in Python comes that
far.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future, collect_all

from gradsync.comm import arguments
from gradsync.comm.executor import Executor, Operation, Work
from gradsync.comm.work import PythonWork
from gradsync.errors import ConfigError

Make = Callable[[int], Operation]  # makes the operation that has this number in the order of the group
Copies = Sequence[tuple[Tensor, Tensor]]  # temporary outputs, and where they belong

# torch's stub gives each method several signatures; ours take all of them at once
_TorchGroup: Any = dist.ProcessGroup


class PythonGroup(_TorchGroup):  # type: ignore[misc]
    """A process group for CPU tensors whose operations are made in Python.

    Subclasses implement the ``_make_...`` methods. They get contiguous CPU tensors of one dtype, with the
    sizes that the operation needs, and the timeout in seconds. The tensors live until the operation is over.
    """

    backend_name = "python"

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, inner: Any) -> None:
        super().__init__(rank, size)
        self.executor = Executor(f"gradsync-{self.backend_name}")
        self._store = store
        self._own_rank = rank
        self._num_ranks = size
        self._timeout_s = timeout.total_seconds()
        self._next_sequence = 0
        self._num_messages = 0
        self._coalesced: list[Work] | None = None
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, inner)

    # -- what subclasses implement

    def _make_all_reduce(self, tensor: Tensor, op: Any, timeout_s: float) -> Make:
        raise NotImplementedError

    def _make_broadcast(self, tensor: Tensor, root: int, timeout_s: float) -> Make:
        raise NotImplementedError

    def _make_reduce(self, tensor: Tensor, root: int, op: Any, timeout_s: float) -> Make:
        raise NotImplementedError

    def _make_all_gather(self, outputs: list[Tensor], tensor: Tensor, timeout_s: float) -> Make:
        raise NotImplementedError

    def _make_gather(self, outputs: list[Tensor], tensor: Tensor, root: int, timeout_s: float) -> Make:
        raise NotImplementedError

    def _make_scatter(self, output: Tensor, tensors: list[Tensor], root: int, timeout_s: float) -> Make:
        raise NotImplementedError

    def _make_reduce_scatter(self, output: Tensor, tensors: list[Tensor], op: Any, timeout_s: float) -> Make:
        raise NotImplementedError

    def _make_all_to_all(self, outputs: list[Tensor], tensors: list[Tensor], timeout_s: float) -> Make:
        raise NotImplementedError

    def _make_barrier(self, timeout_s: float) -> Make:
        raise NotImplementedError

    @property
    def num_issued(self) -> int:
        """How many operations and messages this rank has issued."""
        return self._next_sequence + self._num_messages

    # -- identity

    def getBackendName(self) -> str:  # noqa: N802 (torch's spelling)
        """The name under which the backend is registered."""
        return self.backend_name

    def get_group_store(self) -> Any:
        """The store through which the ranks of the group met."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations issued from now on."""
        self._timeout_s = timeout.total_seconds()
        super().set_timeout(timeout)

    # -- operations, as torch calls them

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Reduce in place, on all ranks."""
        tensor, op = arguments.single(tensors, "all_reduce"), arguments.reduce_op(opts)
        if tensor.layout is not torch.strided:
            return self._all_reduce_sparse(tensor, op)
        timeout_s, is_awaited = self._seconds_and_wait(opts, timeout)
        flat = arguments.contiguous(tensor)
        return self._issue(self._make_all_reduce(flat, op, timeout_s), [tensor], is_awaited, copies=[(flat, tensor)])

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """``allreduce`` of each tensor."""
        return _together([self.allreduce([tensor], opts) for tensor in tensors])

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> Work:
        """Give every rank the tensor of the root."""
        tensor = arguments.single(tensors, "broadcast")
        root = arguments.root_rank(opts if root is None else root, self._num_ranks)
        timeout_s, is_awaited = self._seconds_and_wait(opts, timeout)
        flat = arguments.contiguous(tensor)
        copies = [] if root == self._own_rank else [(flat, tensor)]
        return self._issue(self._make_broadcast(flat, root, timeout_s), [tensor], is_awaited, [flat], copies)

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = ReduceOp.SUM,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Work:
        """Reduce in place on the root; the tensors of other ranks are left as they are."""
        tensor = arguments.single(tensors, "reduce")
        root = arguments.root_rank(opts if root is None else root, self._num_ranks)
        timeout_s, is_awaited = self._seconds_and_wait(opts, timeout)
        flat = arguments.contiguous(tensor)
        make = self._make_reduce(flat, root, getattr(opts, "reduceOp", op), timeout_s)
        copies = [(flat, tensor)] if root == self._own_rank else []
        return self._issue(make, [tensor], is_awaited, [flat], copies)

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Give every rank the tensors of all, as a list."""
        rows, tensor = arguments.inner_list(outputs), arguments.single(tensors, "all_gather")
        arguments.check_list("all_gather", "output", rows, tensor, self._num_ranks)
        timeout_s, is_awaited = self._seconds_and_wait(opts, timeout)
        flats, data = [arguments.contiguous(row) for row in rows], arguments.contiguous(tensor)
        make = self._make_all_gather(flats, data, timeout_s)
        return self._issue(make, rows, is_awaited, [data], list(zip(flats, rows, strict=True)))

    def all_gather_single(
        self, output: Tensor, tensor: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Give every rank the tensors of all, one after the other in one tensor."""
        arguments.check_total("all_gather_single", "output", output, tensor, self._num_ranks)
        timeout_s, is_awaited = self._seconds_and_wait(opts, timeout)
        flat, data = arguments.contiguous(output), arguments.contiguous(tensor)
        make = self._make_all_gather(arguments.equal_parts(flat, self._num_ranks), data, timeout_s)
        return self._issue(make, [output], is_awaited, [data], [(flat, output)])

    _allgather_base = all_gather_single

    def allgather_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """``allgather`` of each input; ``outputs`` holds one list a rank."""
        rows = [[row[index] for row in outputs] for index in range(len(tensors))]
        return _together([self.allgather([row], [tensor], opts) for row, tensor in zip(rows, tensors, strict=True)])

    def all_gather_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """``all_gather_single`` of each pair."""
        return _together([self.all_gather_single(*pair, opts) for pair in zip(outputs, tensors, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self,
        outputs: Any,
        tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Work:
        """Give the root the tensors of all."""
        tensor = arguments.single(tensors, "gather")
        root = arguments.root_rank(opts if root is None else root, self._num_ranks)
        rows = arguments.inner_list(outputs) if root == self._own_rank else []
        if root == self._own_rank:
            arguments.check_list("gather", "output", rows, tensor, self._num_ranks)
        timeout_s, is_awaited = self._seconds_and_wait(opts, timeout)
        flats, data = [arguments.contiguous(row) for row in rows], arguments.contiguous(tensor)
        make = self._make_gather(flats, data, root, timeout_s)
        return self._issue(make, rows, is_awaited, [data], list(zip(flats, rows, strict=True)))

    def scatter(
        self,
        outputs: Any,
        tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Work:
        """Give every rank its tensor of the root's list."""
        output = arguments.single(outputs, "scatter")
        root = arguments.root_rank(opts if root is None else root, self._num_ranks)
        rows = arguments.inner_list(tensors) if root == self._own_rank else []
        if root == self._own_rank:
            arguments.check_list("scatter", "input", rows, output, self._num_ranks)
        timeout_s, is_awaited = self._seconds_and_wait(opts, timeout)
        flat, data = arguments.contiguous(output), [arguments.contiguous(row) for row in rows]
        make = self._make_scatter(flat, data, root, timeout_s)
        return self._issue(make, [output], is_awaited, data, [(flat, output)])

    def reduce_scatter(self, outputs: Any, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Give every rank the reduction of the tensors meant for it."""
        output, rows = arguments.single(outputs, "reduce_scatter"), arguments.inner_list(tensors)
        arguments.check_list("reduce_scatter", "input", rows, output, self._num_ranks)
        return self._reduce_scatter(output, [arguments.contiguous(row) for row in rows], opts, timeout)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """``reduce_scatter`` where the inputs lie one after the other in one tensor."""
        arguments.check_total("reduce_scatter_single", "input", tensor, output, self._num_ranks)
        data = arguments.equal_parts(arguments.contiguous(tensor), self._num_ranks)
        return self._reduce_scatter(output, data, opts, None)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        """``reduce_scatter_single`` of each pair."""
        return _together([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, tensors, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Any, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Send one tensor to each rank and receive one from each."""
        rows = list(outputs)
        arguments.check_count("all_to_all", "output", rows, self._num_ranks)
        arguments.check_count("all_to_all", "input", tensors, self._num_ranks)
        timeout_s, is_awaited = self._seconds_and_wait(opts, timeout)
        flats, data = (
            [arguments.contiguous(row) for row in rows],
            [arguments.contiguous(row) for row in tensors],
        )
        make = self._make_all_to_all(flats, data, timeout_s)
        return self._issue(make, rows, is_awaited, data, list(zip(flats, rows, strict=True)))

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """``alltoall`` where the tensors lie one after the other, cut along the first dimension."""
        timeout_s, is_awaited = self._seconds_and_wait(opts, timeout)
        flat = arguments.contiguous(output)
        outputs = arguments.cut_rows(flat, output_sizes, self._num_ranks, "output")
        data = arguments.cut_rows(arguments.contiguous(tensor), input_sizes, self._num_ranks, "input")
        make = self._make_all_to_all(outputs, data, timeout_s)
        return self._issue(make, [output], is_awaited, data, [(flat, output)])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Wait until every rank has come here."""
        timeout_s, is_awaited = self._seconds_and_wait(opts, timeout)
        return self._issue(self._make_barrier(timeout_s), [], is_awaited)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._coalesced = self._coalesced or [], None
        return _together(works)

    # -- issuing

    def _issue(
        self,
        make: Make,
        result: Any,
        is_awaited: bool,
        inputs: Sequence[Tensor] = (),
        copies: Copies = (),
    ) -> Work:
        """Queue an operation that reads ``inputs`` (they are kept until it is over)."""
        outputs = [(flat, tensor) for flat, tensor in copies if flat is not tensor]

        def make_next() -> Operation:
            operation = make(self._next_sequence)
            self._next_sequence += 1
            return _CopyingBack(operation, outputs) if outputs else operation

        work = self.executor.submit(make_next, result, inputs, is_awaited)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _reduce_scatter(self, output: Tensor, data: list[Tensor], opts: Any, timeout: timedelta | None) -> Work:
        timeout_s, is_awaited = self._seconds_and_wait(opts, timeout)
        flat = arguments.contiguous(output)
        make = self._make_reduce_scatter(flat, data, arguments.reduce_op(opts), timeout_s)
        return self._issue(make, [output], is_awaited, data, [(flat, output)])

    def _all_reduce_sparse(self, tensor: Tensor, op: Any) -> Work:
        """All-reduce of a sparse tensor; unlike the others it waits for its peers when it is issued."""
        if op != ReduceOp.SUM:
            raise ConfigError(f"all_reduce of sparse tensors works with ReduceOp.SUM only, not with {op}")
        mine = tensor.detach().coalesce()
        counts = [int(count) for count in self._gathered(torch.tensor([mine.values().shape[0]]))]
        parts = [
            torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
            for gathered in (
                self._gathered(arguments.padded_rows(rows, max(counts))) for rows in (mine.indices().t(), mine.values())
            )
        ]
        total = torch.sparse_coo_tensor(parts[0].t(), parts[1], tensor.shape, check_invariants=False)
        with torch.no_grad():
            tensor.copy_(total.coalesce())
        return self._issue(lambda sequence: _Nothing(), [tensor], True)

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        outputs = [torch.empty_like(tensor) for _ in range(self._num_ranks)]
        self.allgather([outputs], [tensor]).wait()
        return outputs

    def _seconds_and_wait(self, opts: Any, timeout: timedelta | None) -> tuple[float, bool]:
        return arguments.seconds_and_wait(opts, timeout, self._timeout_s)


class JointWork(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[PythonWork]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all."""
        return all([work.wait(timeout) for work in self._works])

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all([work.is_completed() for work in self._works])

    def is_success(self) -> bool:
        """Whether all have ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """The first error, if there is any."""
        return next((work.error for work in self._works if work.error is not None), None)

    def result(self) -> list[Any]:
        """The results of all, one after the other."""
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:
        """The same as ``wait``."""
        self.wait()

    def get_future(self) -> "Future[Any]":
        """A future of all results, one after the other."""
        gathered = collect_all([work.get_future() for work in self._works])
        return gathered.then(lambda futures: [tensor for each in futures.value() for tensor in each.value()])


def _together(works: list[Work]) -> Any:
    return works[0] if len(works) == 1 else JointWork(works)


class _CopyingBack:
    """An operation on temporary tensors whose results belong elsewhere."""

    def __init__(self, operation: Operation, copies: Copies) -> None:
        self.name = operation.name
        self._operation = operation
        self._copies = copies

    def start(self) -> bool:
        return self._operation.start()

    def finish(self) -> None:
        self._operation.finish()
        with torch.no_grad():
            for flat, tensor in self._copies:
                tensor.copy_(flat)


class _Nothing:
    """An operation that is over when it is issued."""

    name = "all_reduce of a sparse tensor"

    def start(self) -> bool:
        return True

    def finish(self) -> None:
        pass
