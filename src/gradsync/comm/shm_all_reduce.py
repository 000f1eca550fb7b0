"""All-reduce in shared memory, the operation that everything else waits for.

- ``EagerAllReduce``: a small tensor travels inside the packets, and every rank reduces all of them.
- ``LargeAllReduce``: every rank reduces one slice of all contributions and writes the result wherever it is
  needed. Tensors that lie in the segments are reduced in place, in one step. Others are staged in pieces:
  each rank copies in what its peers will read of a piece, and copies out what they have written in its place.
"""

import numpy as np

from gradsync.comm.channel import Channel, Collective, Label
from gradsync.comm.combine import Bytes, Kernel, reduce_parts
from gradsync.comm.wire import Kind

PIECE_BYTES = 2 * 1024 * 1024  # pieces of both ranks stay in the third-level cache; there is room for two of them
_ALIGNMENT = 64  # slices start at cache lines


class EagerAllReduce(Collective):
    """All-reduce of a small tensor: the same as an ``EagerExchange``, with as little as possible around "
    "it."""

    def __init__(
        self, channel: Channel, label: Label, sequence: int, timeout_s: float, data: Bytes, kernel: Kernel
    ) -> None:
        super().__init__(channel, label, sequence, timeout_s)
        self._data = data
        self._kernel = kernel
        self._header = self.header(Kind.EAGER)
        self._num_sent = 0

    def num_bytes_with(self, peer: int) -> int:
        """See ``Collective``."""
        return self._data.size

    def begin(self) -> bool:
        """Send what can be sent."""
        for peer in self.wire.peers[self._num_sent :]:
            if not self.wire.try_send(peer, self._header, self._data):
                return False
            self._num_sent += 1
        return True

    def run(self) -> None:
        """Do the work."""
        peers, data = self.wire.peers, self._data
        for peer in peers[self._num_sent :]:
            self.wire.send(peer, self._header, data, self.deadline)
        packets = self.wire.collect(peers, self.deadline)
        parts = [
            self.payload(peer, packet, self._header, data.size) for peer, packet in zip(peers, packets, strict=True)
        ]
        parts.insert(self.channel.rank, data)
        reduce_parts(self._kernel, parts, [data], self.channel.scratch)


class LargeAllReduce(Collective):
    """All-reduce of a large tensor: each rank reduces its slice for everybody."""

    def __init__(
        self, channel: Channel, label: Label, sequence: int, timeout_s: float, data: Bytes, kernel: Kernel
    ) -> None:
        super().__init__(channel, label, sequence, timeout_s)
        self._data = data
        self._kernel = kernel

    def num_bytes_with(self, peer: int) -> int:
        """See ``Collective``."""
        return self._data.size

    def run(self) -> None:
        """Do the work."""
        self._place = self.channel.offset_of(self._data)
        if self._place is None:
            self._stage = self.channel.stage("all-reduce", 2 * PIECE_BYTES)
            self._copy_in(0)
        offsets, all_placed = self._step(0)
        if all_placed:
            self._reduce(0, self._data.size, offsets)
            self._step(None)
            return
        for start in range(0, self._data.size, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, self._data.size)
            self._reduce(start, stop, offsets)
            following = stop if stop < self._data.size else None
            if following is not None:
                self._copy_in(following)
            offsets, _ = self._step(following)
            self._copy_out(start)

    def _step(self, start: int | None) -> tuple[list[int], bool]:
        """Tell the peers where this rank's piece beginning at ``start`` lies, and wait for what they tell.

        With that every rank also says that it has done its part of the piece before. Returns the offsets by
        rank, and whether the tensors of all ranks lie in their segments.
        """
        mine = 0 if start is None else self._offset(start)
        all_placed = self._place is not None
        header = self.header(Kind.STEP, mine, self._data.size << 1 | all_placed)
        peers = self.wire.peers
        for peer in peers:
            self.wire.send(peer, header, b"", self.deadline)
        offsets = [mine] * self.channel.size
        for peer, packet in zip(peers, self.wire.collect(peers, self.deadline), strict=True):
            _, offsets[peer], second = self.read(peer, packet, Kind.STEP)
            if second >> 1 != self._data.size:
                self.complain(peer, packet)
            all_placed = all_placed and bool(second & 1)
        return offsets, all_placed

    def _offset(self, start: int) -> int:
        """Where in the segment peers find the piece that begins at ``start``."""
        if self._place is not None:
            return self._place + start
        return self._stage + start // PIECE_BYTES % 2 * PIECE_BYTES

    def _slice(self, num_bytes: int) -> tuple[int, int]:
        """The part of so many bytes that this rank reduces."""
        step = -(-num_bytes // (self.channel.size * _ALIGNMENT)) * _ALIGNMENT
        rank = self.channel.rank
        return min(rank * step, num_bytes), min((rank + 1) * step, num_bytes)

    def _reduce(self, start: int, stop: int, offsets: list[int]) -> None:
        """Reduce this rank's slice of a piece into its own tensor and into the memory of all peers."""
        first, last = self._slice(stop - start)
        if first == last:
            return
        memory = self.channel.memory
        mine = self._data[start + first : start + last]
        theirs = {peer: memory[peer][offsets[peer] + first : offsets[peer] + last] for peer in self.wire.peers}
        parts = [theirs.get(rank, mine) for rank in range(self.channel.size)]
        reduce_parts(self._kernel, parts, [mine, *theirs.values()], self.channel.scratch)

    def _copy_in(self, start: int) -> None:
        """Stage all of a piece that peers reduce."""
        if self._place is None:
            for staged, own in self._staged_parts(start):
                np.copyto(staged, own)

    def _copy_out(self, start: int) -> None:
        """Fetch all of a piece that peers have reduced."""
        if self._place is None:
            for staged, own in self._staged_parts(start):
                np.copyto(own, staged)

    def _staged_parts(self, start: int) -> list[tuple[Bytes, Bytes]]:
        """All of a piece but this rank's own slice: in the stage, and in the tensor."""
        data = self._data[start : start + PIECE_BYTES]
        offset = self._offset(start)
        staged = self.channel.segment.bytes[offset : offset + data.size]
        first, last = self._slice(data.size)
        return [(staged[:first], data[:first]), (staged[last:], data[last:])]
