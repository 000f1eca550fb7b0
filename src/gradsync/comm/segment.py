"""Memory that the ranks of one host share: this rank's segment, and the segments of its peers.

A segment is a memfd: it has no name in any file system, so nothing is left behind however a process ends, and
the size of /dev/shm does not limit it. Its size is a reservation of addresses; a page is taken from memory
when it is first written, and given back when the tensor in it dies. Knows nothing of signals and operations.
"""

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from collections import deque

import numpy as np
import torch

from gradsync.comm.combine import Bytes
from gradsync.errors import BackendError

_MIN_RESERVE_BYTES = 256 * 2**20
_ADDRESS_BUDGET_BYTES = 2**45  # a quarter of the addresses that a process has on x86-64, for all segments of a group
_ALIGNMENT = 4096  # whole pages, so that freed memory can be given back


class Segment:
    """The memory that this rank owns and its peers may read and write."""

    def __init__(self, reserve_bytes: int) -> None:
        self.descriptor, self._mapping = _create(reserve_bytes)
        self.size = len(self._mapping)
        self.bytes: Bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self._start = self.bytes.ctypes.data
        self._blocks = _Blocks(self.size)
        self._owner = os.getpid()

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor of zeros in this segment; its memory is given back when its storage dies."""
        num_bytes = numel * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(numel, dtype=dtype)
        offset = self.take(num_bytes)
        # The array is what the storage of the tensor keeps alive: it dies when the last view of the tensor
        # does.
        memory = np.frombuffer(self._mapping, dtype=np.uint8, count=num_bytes, offset=offset)
        weakref.finalize(memory, self.give_back, offset).atexit = False
        return torch.frombuffer(memory, dtype=dtype)

    def take(self, num_bytes: int) -> int:
        """The offset of a free block of this size (see ``give_back``)."""
        offset = self._blocks.take(num_bytes)
        if offset is None:
            raise BackendError(
                f"the shared segment of this rank is full: {num_bytes} bytes were asked for, "
                f"{self.size} bytes of addresses are reserved; free tensors made by allocate()"
            )
        return offset

    def give_back(self, offset: int) -> None:
        """Free the block that ``take`` gave, and its pages."""
        if os.getpid() != self._owner:
            return  # a forked child drops what it has inherited; the pages are its parent's
        self._mapping.madvise(mmap.MADV_REMOVE, offset, self._blocks.length_of(offset))
        self._blocks.give_back(offset)

    def offset_of(self, address: int, num_bytes: int) -> int | None:
        """Where in this segment the memory at ``address`` lies; None if it lies elsewhere."""
        offset = address - self._start
        return offset if 0 <= offset <= self.size - num_bytes else None

    def close_descriptor(self) -> None:
        """Close the descriptor once every peer has it; the mapping stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def map_peer(descriptor: int, num_bytes: int) -> Bytes:
    """The memory behind a peer's descriptor, which is closed; unmapped when the array dies."""
    try:
        mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    _leave_out_of_core_dumps(mapping)
    return np.frombuffer(mapping, dtype=np.uint8)


def default_reserve_bytes(num_ranks: int) -> int:
    """Addresses to reserve for one segment: as much as the machine has memory, within reason."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(_MIN_RESERVE_BYTES, min(memory_bytes, _ADDRESS_BUDGET_BYTES // max(num_ranks, 1)))


def _create(reserve_bytes: int) -> tuple[int, mmap.mmap]:
    """A descriptor and its mapping; smaller than asked for where limits of the process (ulimit) want it."""
    reserve_bytes = -(-reserve_bytes // _ALIGNMENT) * _ALIGNMENT
    while True:
        descriptor = os.memfd_create("gradsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, reserve_bytes)
            mapping = mmap.mmap(descriptor, reserve_bytes, flags=mmap.MAP_SHARED)
        except OSError as error:
            os.close(descriptor)
            if reserve_bytes <= _MIN_RESERVE_BYTES:
                raise BackendError(
                    f"cannot reserve {reserve_bytes} bytes of shared memory: {error}; raise the limits of "
                    "the process (ulimit -v, ulimit -f) or use the gloo backend"
                ) from error
            reserve_bytes = max(_MIN_RESERVE_BYTES, reserve_bytes // 2 // _ALIGNMENT * _ALIGNMENT)
            continue
        # No peer can cut the file and so turn a read of ours into a bus error.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        _leave_out_of_core_dumps(mapping)
        return descriptor, mapping


def _leave_out_of_core_dumps(mapping: mmap.mmap) -> None:
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_DONTDUMP)


class _Blocks:
    """First-fit bookkeeping of one range of addresses."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]  # (offset, length), by offset
        self._used: dict[int, int] = {}
        self._lock = threading.Lock()
        # Finalizers run whenever memory is collected, in the middle of ``take`` too: they only leave a note.
        self._returned: deque[int] = deque()

    def take(self, num_bytes: int) -> int | None:
        length = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._collect_returned()
            for index, (offset, available) in enumerate(self._free):
                if available >= length:
                    self._free[index] = (offset + length, available - length)
                    self._used[offset] = length
                    return offset
        return None

    def length_of(self, offset: int) -> int:
        return self._used[offset]

    def give_back(self, offset: int) -> None:
        self._returned.append(offset)

    def _collect_returned(self) -> None:
        while self._returned:
            offset = self._returned.popleft()
            self._free = _merged(sorted([*self._free, (offset, self._used.pop(offset))]))


def _merged(blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for offset, length in blocks:
        if result and sum(result[-1]) == offset:
            result[-1] = (result[-1][0], result[-1][1] + length)
        elif length:
            result.append((offset, length))
    return result
