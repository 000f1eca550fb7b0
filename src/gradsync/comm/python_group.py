"""What every process group written in Python shares: torch's calling conventions, turned into eleven operations.

``PythonGroup`` takes the many forms in which torch calls a group (lists of lists, options or plain arguments, old
and new names), checks the tensors, makes them contiguous, and asks its subclass for an ``Operation`` of one
plain kind. It runs them through an ``Executor``. It knows nothing of how data travels.

[Note: The inner group] torch reaches some operations of a group from C++ past the Python class (``reduce`` and
``gather`` called by name, for instance) and asks for a backend by device. A gloo backend that connects when it is
first used answers there; nothing that ``torch.distributed`` offers in Python comes that far.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.futures import Future, collect_all

from gradsync.comm.executor import Executor, Operation, Work
from gradsync.errors import ConfigError

Make = Callable[[int], Operation]  # makes the operation that has this number in the order of the group

_CPU = torch.device("cpu")


class PythonGroup(ProcessGroup):
    """A process group for CPU tensors whose operations are made in Python.

    Subclasses implement the ``_make_...`` methods. They get contiguous CPU tensors, of one dtype, with the
    shapes that the operation needs, and the timeout in seconds.
    """

    backend_name = "python"

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, inner: Any) -> None:
        super().__init__(rank, size)
        self._store = store
        self.executor = Executor(f"gradsync-{self.backend_name}")
        self._num_ranks = size
        self._own_rank = rank
        self._timeout_s = timeout.total_seconds()
        self._sequence = 0
        self._coalesced: list[Work] | None = None
        self._register_backend(_CPU, ProcessGroup.BackendType.CUSTOM, inner)

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
        tensor = self._single(tensors, "all_reduce")
        op, timeout_s, is_awaited = self._reduce_options(opts, timeout)
        if tensor.layout is not torch.strided:
            return self._all_reduce_sparse(tensor, op)
        flat = self._writable(tensor)
        make = self._make_all_reduce(flat, op, timeout_s)
        return self._issue(make, [tensor], is_awaited, [(flat, tensor)])

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """``allreduce`` of each tensor."""
        return self._together([self.allreduce([tensor], opts) for tensor in tensors])

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> Work:
        """Give every rank the tensor of the root."""
        tensor = self._single(tensors, "broadcast")
        root, timeout_s, is_awaited = self._root_options(opts if root is None else root, timeout)
        flat = self._writable(tensor)
        return self._issue(
            self._make_broadcast(flat, root, timeout_s), [tensor], is_awaited, [(flat, tensor)]
        )

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = ReduceOp.SUM,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Work:
        """Reduce in place on the root; the tensors of other ranks are left as they are."""
        tensor = self._single(tensors, "reduce")
        if isinstance(opts, dist.ReduceOptions):
            op = opts.reduceOp
        root, timeout_s, is_awaited = self._root_options(opts if root is None else root, timeout)
        flat = self._writable(tensor)
        make = self._make_reduce(flat, root, op, timeout_s)
        return self._issue(make, [tensor], is_awaited, [(flat, tensor)])

    def allgather(
        self, outputs: Any, tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Give every rank the tensors of all, as a list."""
        tensor = self._single(tensors, "all_gather")
        rows = outputs[0] if outputs and isinstance(outputs[0], (list, tuple)) else outputs
        timeout_s, is_awaited = self._options(opts, timeout)
        return self._all_gather(list(rows), tensor, timeout_s, is_awaited, list(rows))

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """Give every rank the tensors of all, one after the other in one tensor."""
        timeout_s, is_awaited = self._options(opts)
        self._check_total("all_gather_single", "output", output, tensor)
        flat = self._writable(output)
        parts = self._parts(flat)
        return self._all_gather(parts, tensor, timeout_s, is_awaited, [output], [(flat, output)])

    _allgather_base = all_gather_single

    def allgather_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Work:
        """``allgather`` of each input; ``outputs`` holds one list a rank."""
        rows = [[row[index] for row in outputs] for index in range(len(tensors))]
        return self._together(
            [self.allgather([row], [tensor], opts) for row, tensor in zip(rows, tensors, strict=True)]
        )

    def all_gather_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Work:
        """``all_gather_single`` of each pair."""
        return self._together(
            [self.all_gather_single(*pair, opts) for pair in zip(outputs, tensors, strict=True)]
        )

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
        tensor = self._single(tensors, "gather")
        root, timeout_s, is_awaited = self._root_options(opts if root is None else root, timeout)
        rows = outputs[0] if outputs and isinstance(outputs[0], (list, tuple)) else outputs
        rows = list(rows) if root == self._own_rank else []
        flats = [self._writable(row) for row in rows]
        if rows:
            self._check_list("gather", "output", flats, tensor)
        make = self._make_gather(flats, self._readable(tensor), root, timeout_s)
        return self._issue(make, rows, is_awaited, list(zip(flats, rows, strict=True)))

    def scatter(
        self,
        outputs: Any,
        tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Work:
        """Give every rank its tensor of the root's list."""
        output = self._single(outputs, "scatter")
        root, timeout_s, is_awaited = self._root_options(opts if root is None else root, timeout)
        rows = tensors[0] if tensors and isinstance(tensors[0], (list, tuple)) else tensors
        flats = [self._readable(row) for row in rows] if root == self._own_rank else []
        if flats:
            self._check_list("scatter", "input", flats, output)
        flat = self._writable(output)
        return self._issue(
            self._make_scatter(flat, flats, root, timeout_s), [output], is_awaited, [(flat, output)]
        )

    def reduce_scatter(
        self, outputs: Any, tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Give every rank the reduction of the tensors meant for it."""
        output = self._single(outputs, "reduce_scatter")
        op, timeout_s, is_awaited = self._reduce_options(opts, timeout)
        rows = tensors[0] if tensors and isinstance(tensors[0], (list, tuple)) else tensors
        flats = [self._readable(row) for row in rows]
        self._check_list("reduce_scatter", "input", flats, output)
        return self._reduce_scatter(output, flats, op, timeout_s, is_awaited)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """``reduce_scatter`` where the inputs lie one after the other in one tensor."""
        op, timeout_s, is_awaited = self._reduce_options(opts, None)
        self._check_total("reduce_scatter_single", "input", tensor, output)
        return self._reduce_scatter(output, self._parts(self._readable(tensor)), op, timeout_s, is_awaited)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Work:
        """``reduce_scatter_single`` of each pair."""
        return self._together(
            [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, tensors, strict=True)]
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(
        self, outputs: Any, tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Send one tensor to each rank and receive one from each."""
        timeout_s, is_awaited = self._options(opts, timeout)
        for rows, what in ((outputs, "outputs"), (tensors, "inputs")):
            if len(rows) != self._num_ranks:
                raise ConfigError(
                    f"all_to_all needs one tensor a rank: {self._num_ranks} {what}, not {len(rows)}"
                )
        flats = [self._writable(row) for row in outputs]
        make = self._make_all_to_all(flats, [self._readable(row) for row in tensors], timeout_s)
        return self._issue(make, list(outputs), is_awaited, list(zip(flats, outputs, strict=True)))

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
        timeout_s, is_awaited = self._options(opts, timeout)
        flat = self._writable(output)
        outputs = self._cut(flat, output_sizes, "output")
        inputs = self._cut(self._readable(tensor), input_sizes, "input")
        make = self._make_all_to_all(outputs, inputs, timeout_s)
        return self._issue(make, [output], is_awaited, [(flat, output)])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Wait until every rank has come here."""
        timeout_s, is_awaited = self._options(opts, timeout)
        return self._issue(self._make_barrier(timeout_s), [], is_awaited)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._coalesced = self._coalesced or [], None
        return self._together(works)

    # -- issuing

    def _issue(
        self,
        make: Make,
        result: Any,
        is_awaited: bool,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Work:
        """Queue an operation; ``copies`` are temporary outputs and where they belong."""
        outputs = [(flat, tensor) for flat, tensor in copies if flat is not tensor]

        def make_next() -> Operation:
            operation = make(self._sequence)
            self._sequence += 1
            return _CopyingBack(operation, outputs) if outputs else operation

        work = self.executor.submit(make_next, result, is_awaited)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _together(self, works: list[Work]) -> Any:
        return works[0] if len(works) == 1 else JointWork(works)

    def _all_gather(
        self,
        rows: list[Tensor],
        tensor: Tensor,
        timeout_s: float,
        is_awaited: bool,
        result: Any,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Work:
        flats = [self._writable(row) for row in rows]
        self._check_list("all_gather", "output", flats, tensor)
        make = self._make_all_gather(flats, self._readable(tensor), timeout_s)
        return self._issue(make, result, is_awaited, [*zip(flats, rows, strict=True), *copies])

    def _reduce_scatter(
        self, output: Tensor, flats: list[Tensor], op: Any, timeout_s: float, is_awaited: bool
    ) -> Work:
        flat = self._writable(output)
        make = self._make_reduce_scatter(flat, flats, op, timeout_s)
        return self._issue(make, [output], is_awaited, [(flat, output)])

    def _all_reduce_sparse(self, tensor: Tensor, op: Any) -> Work:
        """All-reduce of a sparse tensor; unlike the others it waits for its peers when it is issued."""
        if op != ReduceOp.SUM:
            raise ConfigError(f"all_reduce of sparse tensors works with ReduceOp.SUM only, not with {op}")
        mine = tensor.detach().coalesce()
        counts = self._gathered(torch.tensor([mine.values().shape[0]]))
        most = max(int(count) for count in counts)
        indices = self._gathered(_padded(mine.indices().t(), most))
        values = self._gathered(_padded(mine.values(), most))
        sizes = [int(count) for count in counts]
        total = torch.sparse_coo_tensor(
            torch.cat([part[:size] for part, size in zip(indices, sizes, strict=True)]).t(),
            torch.cat([part[:size] for part, size in zip(values, sizes, strict=True)]),
            tensor.shape,
            check_invariants=False,
        ).coalesce()
        with torch.no_grad():
            tensor.copy_(total)
        return self._issue(lambda sequence: _Nothing(), [tensor], True)

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        outputs = [torch.empty_like(tensor) for _ in range(self._num_ranks)]
        self.allgather([outputs], [tensor]).wait()
        return outputs

    # -- options

    def _options(self, opts: Any, timeout: timedelta | None = None) -> tuple[float, bool]:
        """The timeout in seconds, and whether the caller waits at once."""
        if opts is None or not hasattr(opts, "asyncOp"):
            return (self._timeout_s if timeout is None else timeout.total_seconds()), False
        timeout_s = opts.timeout.total_seconds()
        return (timeout_s if timeout_s > 0 else self._timeout_s), not opts.asyncOp

    def _reduce_options(self, opts: Any, timeout: timedelta | None) -> tuple[Any, float, bool]:
        op = ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        return op, *self._options(opts, timeout)

    def _root_options(self, opts: Any, timeout: timedelta | None) -> tuple[int, float, bool]:
        root = int(getattr(opts, "rootRank", opts or 0))
        if not 0 <= root < self._num_ranks:
            raise ConfigError(f"the root must be a rank of the group, 0 to {self._num_ranks - 1}, not {root}")
        return root, *self._options(opts, timeout)

    # -- tensors

    def _single(self, tensors: Any, what: str) -> Tensor:
        if isinstance(tensors, Tensor):
            return tensors
        if len(tensors) != 1:
            raise ConfigError(f"{what} takes one tensor a rank, not {len(tensors)}")
        return tensors[0]  # type: ignore[no-any-return]

    def _check_device(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"the {self.backend_name} backend works on CPU tensors, not on {tensor.device}; use NCCL (or a group "
                'with a backend for each device, "cpu:gloo,cuda:nccl") for them'
            )

    def _writable(self, tensor: Tensor) -> Tensor:
        """The tensor itself if it is contiguous, else a contiguous copy (that ``_issue`` copies back)."""
        self._check_device(tensor)
        return tensor if tensor.is_contiguous() and not tensor.is_conj() else _contiguous(tensor)

    def _readable(self, tensor: Tensor) -> Tensor:
        return self._writable(tensor)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Equal parts of a contiguous tensor, one a rank."""
        return (
            list(flat.detach().reshape(-1).chunk(self._num_ranks))
            if flat.numel()
            else [flat] * self._num_ranks
        )

    def _cut(self, flat: Tensor, sizes: Sequence[int], what: str) -> list[Tensor]:
        rows = flat.shape[0] if flat.dim() else 1
        if not sizes:
            if rows % self._num_ranks:
                raise ConfigError(
                    f"all_to_all_single without sizes cuts the first dimension of the {what} into equal parts, one "
                    f"a rank: {rows} is not divisible by {self._num_ranks}"
                )
            sizes = [rows // self._num_ranks] * self._num_ranks
        if len(sizes) != self._num_ranks or sum(sizes) != rows:
            raise ConfigError(
                f"the {what} sizes of all_to_all_single must be one number a rank ({self._num_ranks}) with the sum "
                f"{rows}, not {list(sizes)}"
            )
        return list(flat.detach().split(list(sizes)))

    def _check_total(self, operation: str, what: str, whole: Tensor, part: Tensor) -> None:
        if whole.dtype != part.dtype or whole.numel() != part.numel() * self._num_ranks:
            raise ConfigError(
                f"the {what} of {operation} must hold {self._num_ranks} times {part.numel()} elements of {part.dtype}, "
                f"not {whole.numel()} of {whole.dtype}"
            )

    def _check_list(self, operation: str, what: str, tensors: Sequence[Tensor], part: Tensor) -> None:
        if len(tensors) != self._num_ranks:
            raise ConfigError(
                f"{operation} needs {self._num_ranks} {what} tensors, one a rank, not {len(tensors)}"
            )
        for index, tensor in enumerate(tensors):
            if tensor.dtype != part.dtype or tensor.numel() != part.numel():
                raise ConfigError(
                    f"{what} tensor {index} of {operation} must hold {part.numel()} elements of {part.dtype}, not "
                    f"{tensor.numel()} of {tensor.dtype}"
                )


class JointWork(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
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


class _CopyingBack:
    """An operation on temporary tensors whose results belong elsewhere."""

    def __init__(self, operation: Operation, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
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
    """An operation that is complete when it is issued."""

    name = "all_reduce of a sparse tensor"

    def start(self) -> bool:
        return True

    def finish(self) -> None:
        pass


def _padded(tensor: Tensor, length: int) -> Tensor:
    result = tensor.new_zeros((length, *tensor.shape[1:]))
    result[: tensor.shape[0]] = tensor
    return result


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
