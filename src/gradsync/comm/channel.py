"""What the operations of a shared-memory group work with: the wire, the memory of all ranks, and the failure.

[Note: Failure] The first failure ends the group: the reason is sent to all peers, so that everybody raises it
and names the same culprit, and every later operation raises it again. Nothing is tried a second time: after a
time-out nobody can know what peers have done with the memory they share. What the watch ends a group for (another
rank's exception, say) is raised here as it is. How the wire told of a failure is put into words, and not shown
beside them.
"""

import functools
import threading
from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

import numpy as np
import torch

from gradsync.comm.arguments import in_a_row
from gradsync.comm.combine import (
    CHUNK_BYTES,
    DTYPE_CODES,
    DTYPE_NAMES,
    NO_BYTES,
    NUMPY_DTYPES,
    Bytes,
    Reduction,
)
from gradsync.comm.segment import Segment
from gradsync.comm.wire import (
    HEADER,
    Kind,
    PeerAbortedError,
    PeerLostError,
    WaitTimeoutError,
    Wire,
    WireClosedError,
    WireError,
    announced_bytes,
)
from gradsync.errors import BackendError, GradsyncError


class Channel:
    """This rank's end of a shared-memory group."""

    def __init__(
        self,
        rank: int,
        global_ranks: Sequence[int],
        wire: Wire,
        segment: Segment,
        memory: dict[int, Bytes],
    ) -> None:
        self.rank = rank
        self.size = len(global_ranks)
        self.peers = wire.peers
        self.wire = wire
        self.segment = segment
        self.memory = memory
        self.scratch: Bytes = np.empty(CHUNK_BYTES, dtype=np.uint8)
        self.failure: GradsyncError | None = None
        self._failure_lock = threading.Lock()
        self.wires = [wire]  # all that are told of a failure
        self._global_ranks = list(global_ranks)
        self._stages: dict[str, int] = {}

    def stage(self, purpose: str, num_bytes: int) -> int:
        """Where in the segment data is staged for this purpose; taken from it when first asked for."""
        if purpose not in self._stages:
            self._stages[purpose] = self.segment.take(num_bytes)
        return self._stages[purpose]

    def bytes_of(self, tensor: torch.Tensor) -> Bytes:
        """The memory of a contiguous tensor (which the caller keeps alive)."""
        num_bytes = tensor.nbytes
        if not num_bytes:
            return NO_BYTES
        offset = self.segment.offset_of(tensor.data_ptr(), num_bytes)
        if offset is not None:
            return self.segment.bytes[offset : offset + num_bytes]
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.dtype not in NUMPY_DTYPES:
            tensor = in_a_row(tensor).view(torch.uint8)
        flat = tensor.numpy()
        return (flat if flat.ndim == 1 else flat.reshape(-1)).view(np.uint8)

    def offset_of(self, data: Bytes) -> int | None:
        """Where in this rank's segment ``data`` lies; None if it lies elsewhere."""
        return self.segment.offset_of(data.ctypes.data, data.size)

    def name_of(self, ranks: Sequence[int]) -> str:
        """The global names of ranks of this group, for messages."""
        names = ", ".join(str(self._global_ranks[rank]) for rank in ranks)
        return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"

    def check(self, what: str) -> None:
        """Raise if the group has failed before."""
        if self.failure is not None:
            raise BackendError(f"{what} cannot run: the group has failed before: {self.failure}") from self.failure

    def failed(self, what: str, error: BaseException) -> BaseException:
        """End the group because of ``error``; returns what to raise, with ``error`` as its cause if that says more."""
        failure = self.fail(what, error)
        if failure is not error:
            failure.__cause__ = None if isinstance(error, WireError) else error
        return failure

    def fail(self, what: str, error: BaseException) -> BaseException:
        """End the group because of ``error``; returns what to raise: the first failure.

        An interrupt ends the group like any error, and is raised itself.
        """
        with self._failure_lock:
            if self.failure is None:
                self.failure = self._explain(what, error)
            failure = self.failure
        for wire in self.wires:
            wire.abort(str(failure))
        return failure if isinstance(error, Exception) else error

    def _explain(self, what: str, error: BaseException) -> GradsyncError:
        me = self.name_of([self.rank])
        match error:
            case GradsyncError():
                return error
            case PeerLostError(has_said_goodbye=True):
                text = (
                    f"{self.name_of(error.ranks)} left the group while {me} was in {what}; all ranks of a "
                    "group have to issue the same operations before any of them ends or destroys the group: give all "
                    "ranks the same number of batches, or use join()"
                )
            case PeerLostError():
                text = (
                    f"{self.name_of(error.ranks)} died while {me} was in {what} (its connection closed "
                    "without a goodbye); the cause is in the output of that rank, or it was killed"
                )
            case PeerAbortedError():
                who = self.name_of([error.rank])
                text = f"{who} gave up while {me} was in {what}; its reason: {error.reason}"
            case WaitTimeoutError():
                text = (
                    f"{what} timed out on {me}: nothing came from {self.name_of(error.missing)}; that rank "
                    "is late, stuck, or has issued fewer operations on this group"
                )
            case WireClosedError() if self.wire.is_inherited:
                text = (
                    f"{what} was issued in a child that was forked from {me}: a process group belongs to the process "
                    "that made it; use it there, or start the child with the spawn method and make its own"
                )
            case WireClosedError():
                text = f"the group was destroyed on {me} while {what} was not complete; wait for it first"
            case _:
                text = f"{what} was interrupted on {me} by {type(error).__name__}: {error}"
        return BackendError(text)

    def close(self) -> None:
        """Give everything back that is not in use by a tensor."""
        self.failure = self.failure or BackendError("the group was destroyed")
        for wire in self.wires:
            wire.close()
        self.memory.clear()

    def say_goodbye(self) -> None:
        """Leave in peace: peers that still wait for this rank fail, others go on."""
        for wire in self.wires:
            wire.goodbye()


OPERATIONS = (
    "barrier",
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
)


class Label(NamedTuple):
    """What an operation is: in a word for people, and in a number that must be equal on all ranks."""

    operation: str
    signature: int


@functools.lru_cache(maxsize=1024)
def label(
    operation: str,
    dtype: torch.dtype | None = None,
    reduction: Reduction | None = None,
    root: int | None = None,
) -> Label:
    """The label of an operation."""
    signature = (
        OPERATIONS.index(operation) << 48
        | (0 if reduction is None else reduction + 1) << 40
        | (0 if dtype is None else DTYPE_CODES[dtype]) << 32
        | (0 if root is None else root + 1)
    )
    return Label(operation, signature)


def describe(signature: int) -> str:
    """The words for a signature."""
    operation = OPERATIONS[signature >> 48] if signature >> 48 < len(OPERATIONS) else "?"
    reduction, dtype, root = signature >> 40 & 0xFF, signature >> 32 & 0xFF, signature & 0xFFFFFFFF
    words = [operation]
    if reduction:
        words.append(Reduction(reduction - 1).name)
    if dtype:
        words.append(f"of {DTYPE_NAMES.get(dtype, '?')}")
    if root:
        words.append(f"with root {root - 1}")
    return " ".join(words)


def in_elements(num_bytes: int, signature: int) -> str:
    """A size in elements of the operation's dtype."""
    dtype = next((dtype for dtype, code in DTYPE_CODES.items() if code == signature >> 32 & 0xFF), torch.uint8)
    number = num_bytes // dtype.itemsize
    return f"{number} element{'' if number == 1 else 's'}"


class Collective:
    """What all operations share: a place in the order, a deadline, and the check of what peers say."""

    def __init__(self, channel: Channel, label: Label, sequence: int, timeout_s: float) -> None:
        self.channel = channel
        self.wire = channel.wire
        self.label = label
        self.signature = label.signature
        self.sequence = sequence
        self.timeout_s = timeout_s
        self.deadline: float | None = None

    @property
    def name(self) -> str:
        """What to call this operation in messages."""
        return f"{self.label.operation} number {self.sequence}"

    def start(self) -> bool:
        """See ``Operation.start``."""
        if self.channel.failure is not None:
            self.channel.check(self.name)
        try:
            return self.begin()
        except BaseException as error:
            raise self.channel.failed(self.name, error)  # noqa: B904 - which says itself what caused it

    def finish(self) -> None:
        """See ``Operation.finish``."""
        if self.channel.failure is not None:
            self.channel.check(self.name)
        self.deadline = monotonic() + self.timeout_s
        try:
            self.run()
        except BaseException as error:
            raise self.channel.failed(self.name, error)  # noqa: B904 - which says itself what caused it

    def begin(self) -> bool:
        """Do what ``start`` does."""
        return False

    def run(self) -> None:
        """Do what ``finish`` does."""
        raise NotImplementedError

    def header(self, kind: Kind, first: int = 0, second: int = 0) -> bytes:
        """A packet of this operation without payload."""
        return HEADER.pack(kind, self.sequence, self.signature, first, second)

    def read(self, peer: int, packet: bytes, *kinds: Kind) -> tuple[Kind, int, int]:
        """Kind and values of a packet, if the peer is in the same operation as this rank.

        Raises:
            BackendError: it is not.
        """
        kind, sequence, signature, first, second = HEADER.unpack_from(packet)
        if sequence != self.sequence or signature != self.signature or kind not in kinds:
            self.complain(peer, packet)
        return Kind(kind), first, second

    def payload(self, peer: int, packet: bytes, header: bytes, num_bytes: int) -> Bytes:
        """What a packet carries, which must have this header and size."""
        if len(packet) != HEADER.size + num_bytes or not packet.startswith(header):
            self.complain(peer, packet)
        return np.frombuffer(packet, dtype=np.uint8, offset=HEADER.size) if num_bytes else NO_BYTES

    def num_bytes_with(self, peer: int) -> int:
        """How many bytes this rank takes from a peer, or gives it if it takes none."""
        raise NotImplementedError

    def complain(self, peer: int, packet: bytes) -> None:
        """Raise what is wrong with a packet that does not belong to this operation."""
        me, other = self.channel.name_of([self.channel.rank]), self.channel.name_of([peer])
        signature = HEADER.unpack_from(packet)[2]
        mine, theirs = describe(self.signature), describe(signature)
        what = f"{mine} against {theirs}"
        if mine == theirs:
            what = f"{mine}, but with tensors of different sizes"
            num_bytes = announced_bytes(packet)
            if num_bytes is not None:
                own, others = in_elements(self.num_bytes_with(peer), signature), in_elements(num_bytes, signature)
                what += f", {own} on {me} and {others} on {other}"
        raise BackendError(
            f"the ranks do not issue the same operation: {me} and {other} are in {what} (number {self.sequence} of the "
            "group); every rank has to issue the same operations with the same shapes and dtypes in the same order"
        )
