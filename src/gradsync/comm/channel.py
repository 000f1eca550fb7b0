"""What the operations of a shared-memory group work with: the wire, the memory of all ranks, and the failure.

[Note: Failure] The first failure ends the group: the reason is sent to all peers, so that everybody raises it
and names the same culprit, and every later operation raises it again. Nothing is tried a second time: after a
time-out nobody can know what peers have done with the memory they share.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from time import monotonic

import numpy as np
import torch

from gradsync.comm.combine import CHUNK_BYTES, DTYPE_CODES, DTYPE_NAMES, Bytes, Reduction
from gradsync.comm.segment import Segment
from gradsync.comm.wire import (
    HEADER,
    Kind,
    PeerAbortedError,
    PeerLostError,
    WaitTimeoutError,
    Wire,
    WireClosedError,
)
from gradsync.errors import BackendError

STAGE_BYTES = (
    4 * 1024 * 1024
)  # how much of a foreign tensor is copied into the segment at a time; twice that is used


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
        self.failure: BackendError | None = None
        self._failure_lock = threading.Lock()
        self.wires = [wire]  # all that are told of a failure
        self._global_ranks = list(global_ranks)
        self._stage: int | None = None

    def stage(self) -> int:
        """Where in the segment foreign tensors are staged: ``2 * STAGE_BYTES`` from this offset."""
        if self._stage is None:
            self._stage = self.segment.take(2 * STAGE_BYTES)
        return self._stage

    def bytes_of(self, tensor: torch.Tensor) -> Bytes:
        """The memory of a contiguous tensor."""
        num_bytes = tensor.nbytes
        offset = self.segment.offset_of(tensor.data_ptr(), num_bytes) if num_bytes else None
        if offset is not None:
            return self.segment.bytes[offset : offset + num_bytes]
        return tensor.detach().reshape(-1).view(torch.uint8).numpy()

    def offset_of(self, data: Bytes) -> int | None:
        """Where in this rank's segment ``data`` lies; None if it lies elsewhere."""
        return self.segment.offset_of(data.ctypes.data, data.size)

    def name_of(self, ranks: Sequence[int]) -> str:
        """The global names of ranks of this group, for messages."""
        names = ", ".join(str(self._global_ranks[rank]) for rank in ranks)
        return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Turn whatever goes wrong inside into one clear error, for this rank and all others."""
        if self.failure is not None:
            raise BackendError(
                f"{what} cannot run: the group has failed before: {self.failure}"
            ) from self.failure
        try:
            yield
        except BaseException as error:
            failure = self.fail(what, error)
            if isinstance(error, Exception):
                raise failure from error
            raise

    def fail(self, what: str, error: BaseException) -> BackendError:
        """End the group because of ``error``; returns the failure, which is another one if it came first."""
        with self._failure_lock:
            if self.failure is None:
                self.failure = self._explain(what, error)
            failure = self.failure
        for wire in self.wires:
            wire.abort(str(failure))
        return failure

    def _explain(self, what: str, error: BaseException) -> BackendError:
        me = self.name_of([self.rank])
        match error:
            case BackendError():
                return error
            case PeerLostError(has_said_goodbye=True):
                text = (
                    f"{self.name_of(error.ranks)} left the group while {me} was in {what}; all ranks of a group "
                    "have to issue the same operations before any of them ends or destroys the group"
                )
            case PeerLostError():
                text = (
                    f"{self.name_of(error.ranks)} died while {me} was in {what} (its connection closed without "
                    "a goodbye); the cause is in the output of that rank, or it was killed"
                )
            case PeerAbortedError():
                text = f"{self.name_of([error.rank])} gave up while {me} was in {what}; its reason: {error.reason}"
            case WaitTimeoutError():
                text = (
                    f"{what} timed out on {me}: nothing came from {self.name_of(error.missing)}; that rank is "
                    "late, stuck, or has issued fewer operations on this group"
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


class Label:
    """What an operation is, in words for people and in a number that must be equal on all ranks."""

    def __init__(
        self,
        operation: str,
        dtype: torch.dtype | None = None,
        reduction: Reduction | None = None,
        root: int | None = None,
    ) -> None:
        self.operation = operation
        self.signature = (
            OPERATIONS.index(operation) << 48
            | (0 if reduction is None else reduction + 1) << 40
            | (0 if dtype is None else DTYPE_CODES[dtype]) << 32
            | (0 if root is None else root + 1)
        )


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


class Collective:
    """What all operations share: their place in the order, their deadline, and the check of what peers say."""

    def __init__(self, channel: Channel, label: Label, sequence: int, timeout_s: float) -> None:
        self.name = f"{label.operation} number {sequence}"
        self.channel = channel
        self.wire = channel.wire
        self.signature = label.signature
        self.sequence = sequence
        self.timeout_s = timeout_s
        self.deadline: float | None = None

    def start(self) -> bool:
        """See ``Operation.start``."""
        return False

    def finish(self) -> None:
        """See ``Operation.finish``."""
        with self.channel.guard(self.name):
            self.deadline = monotonic() + self.timeout_s
            self.run()

    def run(self) -> None:
        """Do the work."""
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
            self.complain(peer, signature, kind)
        return Kind(kind), first, second

    def complain(self, peer: int, signature: int, kind: int) -> None:
        """Raise what is wrong with a packet that does not belong to this operation."""
        mine, theirs = describe(self.signature), describe(signature)
        what = f"{mine} against {theirs}"
        if mine == theirs:
            what = f"{mine}, but with tensors of different sizes"
        raise BackendError(
            f"the ranks do not issue the same operation: {self.channel.name_of([self.channel.rank])} and "
            f"{self.channel.name_of([peer])} are in {what} (number {self.sequence} of the group); every rank has "
            "to issue the same operations with the same shapes and dtypes in the same order"
        )
