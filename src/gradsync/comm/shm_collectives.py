"""The operations of a shared-memory group, in three ways of moving data.

- ``EagerExchange``: small contributions travel inside the packets; nothing is shared but the wire.
- ``StreamExchange``: larger ones are read by the receivers out of the segment of the sender; tensors that do
  not lie in it are copied there piece by piece.
- ``SlicedAllReduce``: every rank reduces one slice of all contributions, in place, and writes the result into
  the memory of all ranks.

What is exchanged (who gets which bytes of whom, and what becomes of them) is an ``Exchange``, made in
``shm``.

[Note: Complete means free] An operation is complete when this rank has its result *and* no peer will touch
the memory of this rank any more for it. Nothing is remembered from one operation to the next.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gradsync.comm.channel import STAGE_BYTES, Channel, Collective, Label
from gradsync.comm.combine import Bytes, Kernel, reduce_parts
from gradsync.comm.wire import Kind
from gradsync.errors import BackendError

_ALIGNMENT = 64  # slices and pieces start at cache lines


@dataclass
class Publication:
    """Bytes of this rank that some peers get, all of them the same."""

    data: Bytes
    readers: Sequence[int]


@dataclass
class Exchange:
    """Who gets what in one operation, seen from one rank."""

    publications: list[Publication] = field(default_factory=list)
    expected_bytes: dict[int, int] = field(default_factory=dict)  # by the peer that they come from
    targets: dict[int, Bytes] = field(default_factory=dict)  # where they go, unless they are reduced
    reduced: "Reduced | None" = None
    after: Callable[[], None] | None = None

    def largest_bytes(self) -> int:
        """The most that passes between any two ranks, as far as this rank knows."""
        sent = [publication.data.size for publication in self.publications]
        return max([*sent, *self.expected_bytes.values()], default=0)


@dataclass
class Reduced:
    """Where the sum of what comes from the peers and of this rank's own part goes."""

    kernel: Kernel
    own: Bytes
    out: Bytes

    def combine(self, channel: Channel, parts: dict[int, Bytes], start: int, stop: int) -> None:
        """Reduce bytes ``start`` to ``stop`` of all parts, in rank order."""
        parts[channel.rank] = self.own[start:stop]
        ordered = [parts[rank] for rank in range(channel.size)]
        reduce_parts(self.kernel, ordered, [self.out[start:stop]], channel.scratch)


class EagerExchange(Collective):
    """Sends everything at once, inside the packets."""

    def __init__(self, channel: Channel, label: Label, sequence: int, timeout_s: float, exchange: Exchange) -> None:
        super().__init__(channel, label, sequence, timeout_s)
        self._exchange = exchange
        self._to_send = [
            (peer, publication.data) for publication in exchange.publications for peer in publication.readers
        ]
        self._header = self.header(Kind.EAGER)

    def begin(self) -> bool:
        """Send what can be sent."""
        while self._to_send:
            peer, data = self._to_send[-1]
            if not self.wire.try_send(peer, self._header, data):
                return False
            self._to_send.pop()
        return True

    def run(self) -> None:
        """Do the work."""
        exchange = self._exchange
        while self._to_send:
            peer, data = self._to_send.pop()
            self.wire.send(peer, self._header, data, self.deadline)
        sources = list(exchange.expected_bytes)
        packets = self.wire.collect(sources, self.deadline)
        received = {
            peer: self.payload(peer, packet, self._header, exchange.expected_bytes[peer])
            for peer, packet in zip(sources, packets, strict=True)
        }
        if exchange.reduced is not None:
            exchange.reduced.combine(self.channel, received, 0, exchange.reduced.own.size)
        else:
            for peer, target in exchange.targets.items():
                np.copyto(target, received[peer])
        if exchange.after is not None:
            exchange.after()


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


class _Outflow:
    """A publication on its way: piece by piece, two at a time, each piece free once all readers have taken "
    "it."""

    def __init__(self, operation: "StreamExchange", publication: Publication, stage: int, piece_bytes: int) -> None:
        self._operation = operation
        self._publication = publication
        self._segment = operation.channel.segment
        self._place = operation.channel.offset_of(publication.data)
        self._stage = stage
        self._piece_bytes = piece_bytes
        self._sent = 0
        self._num_pieces = 0
        self._untaken: deque[set[int]] = deque()  # of each piece that is out: the readers that have not taken it

    def advance(self) -> None:
        """Announce what can be announced now."""
        data = self._publication.data
        while self._sent < data.size and len(self._untaken) < 2:
            if self._place is not None:
                offset, length = self._place, data.size
            else:
                length = min(self._piece_bytes, data.size - self._sent)
                offset = self._stage + self._num_pieces % 2 * self._piece_bytes
                np.copyto(self._segment.bytes[offset : offset + length], data[self._sent : self._sent + length])
            header = self._operation.header(Kind.PIECE, offset, length)
            for peer in self._publication.readers:
                self._operation.wire.send(peer, header, b"", self._operation.deadline)
            self._sent += length
            self._num_pieces += 1
            self._untaken.append(set(self._publication.readers))

    def taken(self, peer: int) -> None:
        """``peer`` has read the oldest piece that it had not read."""
        next(piece for piece in self._untaken if peer in piece).discard(peer)
        while self._untaken and not self._untaken[0]:
            self._untaken.popleft()

    def waits_for(self) -> set[int]:
        """The readers that have not taken everything."""
        return set().union(*self._untaken)


class _Inflow:
    """What one peer has announced to this rank and this rank has not used."""

    def __init__(self, memory: Bytes, expected: int) -> None:
        self._memory = memory
        self.missing = expected  # bytes that are not used yet
        self._pieces: deque[list[int]] = deque()  # offset and bytes left

    def announce(self, offset: int, length: int) -> None:
        self._pieces.append([offset, length])

    def available(self) -> int:
        return self._pieces[0][1] if self._pieces else 0

    def use(self, length: int) -> Bytes:
        """The next ``length`` bytes, all of them in one piece."""
        piece = self._pieces[0]
        data = self._memory[piece[0] : piece[0] + length]
        piece[0] += length
        piece[1] -= length
        self.missing -= length
        return data

    def drop_used(self) -> bool:
        """Forget the oldest piece if all of it was used; True if so."""
        if self._pieces and not self._pieces[0][1]:
            self._pieces.popleft()
            return True
        return False


class StreamExchange(Collective):
    """Announces pieces of the segment, and uses those that peers announce."""

    def __init__(self, channel: Channel, label: Label, sequence: int, timeout_s: float, exchange: Exchange) -> None:
        super().__init__(channel, label, sequence, timeout_s)
        self._exchange = exchange
        self._position = 0  # bytes that are reduced

    def run(self) -> None:
        """Do the work."""
        exchange = self._exchange
        self._outflows = self._make_outflows()
        self._inflows = {
            peer: _Inflow(self.channel.memory[peer], expected)
            for peer, expected in exchange.expected_bytes.items()
            if expected
        }
        for outflow in self._outflows:
            outflow.advance()
        while waits_for := self._waits_for():
            peer, packet = self.wire.receive_any(waits_for, self.deadline)
            kind, first, second = self.read(peer, packet, Kind.PIECE, Kind.TAKEN)
            if kind is Kind.TAKEN:
                self._taken(peer)
            else:
                self._arrived(peer, first, second)
        if exchange.after is not None:
            exchange.after()

    def _make_outflows(self) -> list[_Outflow]:
        publications = [each for each in self._exchange.publications if each.data.size and each.readers]
        if not publications:
            return []
        stage = self.channel.stage()
        piece_bytes = STAGE_BYTES // len(publications) // _ALIGNMENT * _ALIGNMENT
        return [
            _Outflow(self, publication, stage + 2 * index * piece_bytes, piece_bytes)
            for index, publication in enumerate(publications)
        ]

    def _waits_for(self) -> set[int]:
        peers = {peer for peer, inflow in self._inflows.items() if inflow.missing}
        return peers.union(*(outflow.waits_for() for outflow in self._outflows))

    def _taken(self, peer: int) -> None:
        for outflow in self._outflows:
            if peer in outflow.waits_for():
                outflow.taken(peer)
                outflow.advance()
                return

    def _arrived(self, peer: int, offset: int, length: int) -> None:
        inflow = self._inflows.get(peer)
        if inflow is None or length > inflow.missing:
            raise BackendError(
                f"{self.channel.name_of([peer])} sends more to {self.channel.name_of([self.channel.rank])} "
                f"in {self.name} than is expected: the sizes of the tensors differ between the ranks"
            )
        inflow.announce(offset, length)
        if self._exchange.reduced is None:
            self._copy(peer, inflow)
        else:
            self._reduce(self._exchange.reduced)
        for each, flow in self._inflows.items():
            if flow.drop_used():
                self.wire.send(each, self.header(Kind.TAKEN), b"", self.deadline)

    def _copy(self, peer: int, inflow: _Inflow) -> None:
        target = self._exchange.targets[peer]
        start, length = target.size - inflow.missing, inflow.available()
        np.copyto(target[start : start + length], inflow.use(length))

    def _reduce(self, reduced: Reduced) -> None:
        while length := min(inflow.available() for inflow in self._inflows.values()):
            parts = {peer: inflow.use(length) for peer, inflow in self._inflows.items()}
            reduced.combine(self.channel, parts, self._position, self._position + length)
            self._position += length
            if any(not inflow.available() for inflow in self._inflows.values()):
                return


class SlicedAllReduce(Collective):
    """All-reduce of a large tensor: each rank reduces its slice for everybody.

    Where all tensors lie in the segments, the whole is done in one step, in place. Else it is done in pieces:
    each rank stages what others need of a piece, and copies out what others have written into its stage.
    """

    def __init__(
        self, channel: Channel, label: Label, sequence: int, timeout_s: float, data: Bytes, kernel: Kernel
    ) -> None:
        super().__init__(channel, label, sequence, timeout_s)
        self._data = data
        self._kernel = kernel

    def run(self) -> None:
        """Do the work."""
        self._place = self.channel.offset_of(self._data)
        if self._place is None:
            self._stage_at = self.channel.stage()
            self._copy_in(0)
        are_placed, offsets = self._step(0)
        if are_placed:
            self._reduce(0, self._data.size, offsets)
            self._step(None)
            return
        for start in range(0, self._data.size, STAGE_BYTES):
            stop = min(start + STAGE_BYTES, self._data.size)
            self._reduce(start, stop, offsets)
            following = stop if stop < self._data.size else None
            if self._place is None and following is not None:
                self._copy_in(following)
            _, offsets = self._step(following)
            if self._place is None:
                self._copy_out(start, stop)

    def _step(self, start: int | None) -> tuple[bool, list[int]]:
        """Tell the peers where the piece that begins at ``start`` lies, and learn it of them.

        With that every rank also says that it has done its part of the piece before.
        """
        mine = 0 if start is None else self._offset(start)
        header = self.header(Kind.STEP, mine, self._data.size << 1 | (self._place is not None))
        for peer in self.channel.peers:
            self.wire.send(peer, header, b"", self.deadline)
        are_placed = self._place is not None
        offsets = {self.channel.rank: mine}
        packets = self.wire.collect(self.channel.peers, self.deadline)
        for peer, packet in zip(self.channel.peers, packets, strict=True):
            _, offsets[peer], second = self.read(peer, packet, Kind.STEP)
            if second >> 1 != self._data.size:
                self.complain(peer, self.signature)
            are_placed = are_placed and bool(second & 1)
        return are_placed, [offsets[rank] for rank in range(self.channel.size)]

    def _offset(self, start: int) -> int:
        if self._place is not None:
            return self._place + start
        return self._stage_at + start // STAGE_BYTES % 2 * STAGE_BYTES

    def _slice(self, rank: int, length: int) -> tuple[int, int]:
        """The part of a piece of ``length`` bytes that ``rank`` reduces."""
        step = -(-length // (self.channel.size * _ALIGNMENT)) * _ALIGNMENT
        return min(rank * step, length), min((rank + 1) * step, length)

    def _reduce(self, start: int, stop: int, offsets: list[int]) -> None:
        """Reduce this rank's slice of a piece and write it wherever it is needed."""
        first, last = self._slice(self.channel.rank, stop - start)
        if first == last:
            return
        mine = self._data[start + first : start + last]
        parts = [
            mine if rank == self.channel.rank else self.channel.memory[rank][offset + first : offset + last]
            for rank, offset in enumerate(offsets)
        ]
        targets = [mine, *(part for part in parts if part is not mine)]
        reduce_parts(self._kernel, parts, targets, self.channel.scratch)

    def _copy_in(self, start: int) -> None:
        self._copy(start, is_in=True)

    def _copy_out(self, start: int, stop: int) -> None:
        self._copy(start, is_in=False)

    def _copy(self, start: int, is_in: bool) -> None:
        """Copy all of a piece but this rank's own slice between the tensor and the stage."""
        data = self._data[start : start + STAGE_BYTES]
        offset = self._offset(start)
        stage = self.channel.segment.bytes[offset : offset + data.size]
        first, last = self._slice(self.channel.rank, data.size)
        for part in (slice(0, first), slice(last, data.size)):
            if is_in:
                np.copyto(stage[part], data[part])
            else:
                np.copyto(data[part], stage[part])
