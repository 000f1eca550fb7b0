"""The operations of a shared-memory group that move data, in two ways (all-reduce is in ``shm_all_reduce``).

- ``EagerExchange``: small contributions travel inside the packets; nothing is shared but the wire.
- ``StreamExchange``: larger ones are read by the receivers out of the segment of the sender; tensors that do
  not lie in it are copied there piece by piece.

What is exchanged (who gets which bytes of whom, and what becomes of them) is an ``Exchange``, made in
``shm``. The first piece that a reader is told of says how much there is in all, also if that is nothing: a reader that
expects another amount says so at once, while the sender is still there to hear it.

[Note: Complete means free] An operation is complete when this rank has its result *and* no peer will touch
the memory of this rank any more for it. Nothing is remembered from one operation to the next.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gradsync.comm.channel import Channel, Collective, Label
from gradsync.comm.combine import Bytes, Kernel, reduce_parts
from gradsync.comm.wire import HEADER, TOTAL, Kind
from gradsync.errors import BackendError

STAGE_BYTES = 8 * 1024 * 1024  # for all staged pieces of an operation
_PIECES_AHEAD = 4  # of each publication
_LEAST_PIECE_BYTES = 128 * 1024
_ALIGNMENT = 64  # pieces start at cache lines


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

    def num_bytes_with(self, peer: int) -> int:
        """How much this rank takes from a peer, or gives it if it takes nothing."""
        given = [publication.data.size for publication in self.publications if peer in publication.readers]
        return self.expected_bytes.get(peer, sum(given))


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

    def num_bytes_with(self, peer: int) -> int:
        """See ``Collective``."""
        return self._exchange.num_bytes_with(peer)

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


class _Outflow:
    """A publication on its way: piece by piece, each free again once all readers have taken it."""

    def __init__(self, operation: "StreamExchange", publication: Publication, stage: int, room_bytes: int) -> None:
        self._operation = operation
        self._publication = publication
        self._segment = operation.channel.segment
        self._place = operation.channel.offset_of(publication.data)
        self._stage = stage
        # Readers copy one piece out while the next is copied in, so a small tensor is cut into some pieces too.
        wanted = max(publication.data.size // _PIECES_AHEAD, _LEAST_PIECE_BYTES)
        self._piece_bytes = min(wanted, room_bytes // _PIECES_AHEAD) // _ALIGNMENT * _ALIGNMENT
        self._sent = 0
        self._num_pieces = 0
        # Of each piece that is out: the readers that have not taken it.
        self._untaken: deque[set[int]] = deque()

    def begin(self) -> None:
        """Announce the first pieces, and with them how much there is."""
        if self._publication.data.size:
            self.advance()
        else:
            self._announce(0, 0)

    def advance(self) -> None:
        """Announce what can be announced now."""
        data = self._publication.data
        while self._sent < data.size and len(self._untaken) < _PIECES_AHEAD:
            if self._place is not None:
                offset, length = self._place, data.size
            else:
                length = min(self._piece_bytes, data.size - self._sent)
                offset = self._stage + self._num_pieces % _PIECES_AHEAD * self._piece_bytes
                np.copyto(self._segment.bytes[offset : offset + length], data[self._sent : self._sent + length])
            self._announce(offset, length)
            self._sent += length
            self._num_pieces += 1
            self._untaken.append(set(self._publication.readers))

    def _announce(self, offset: int, length: int) -> None:
        operation, readers = self._operation, self._publication.readers
        total = b"" if self._num_pieces else TOTAL.pack(self._publication.data.size)
        header = operation.header(Kind.PIECE, offset, length)
        for peer in readers:
            operation.wire.send(peer, header, total, operation.deadline)

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
        self.has_begun = False
        self.missing = expected  # bytes that are not used yet
        self._pieces: deque[list[int]] = deque()  # offset and bytes left

    def announce(self, offset: int, length: int) -> None:
        self.has_begun = True
        if length:
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

    def num_bytes_with(self, peer: int) -> int:
        """See ``Collective``."""
        return self._exchange.num_bytes_with(peer)

    def run(self) -> None:
        """Do the work."""
        exchange = self._exchange
        self._outflows = self._make_outflows()
        self._inflows = {
            peer: _Inflow(self.channel.memory[peer], expected) for peer, expected in exchange.expected_bytes.items()
        }
        try:
            self._flow()
        finally:
            self._outflows = []  # they know this operation: together they would keep the tensors from being freed
        if exchange.after is not None:
            exchange.after()

    def _flow(self) -> None:
        for outflow in self._outflows:
            outflow.begin()
        while waits_for := self._waits_for():
            peer, packet = self.wire.receive_any(waits_for, self.deadline)
            kind, first, second = self.read(peer, packet, Kind.PIECE, Kind.TAKEN)
            if kind is Kind.TAKEN:
                self._taken(peer)
            else:
                self._check_total(peer, packet)
                self._arrived(peer, first, second)

    def _make_outflows(self) -> list[_Outflow]:
        publications = [each for each in self._exchange.publications if each.readers]
        if not publications:
            return []
        stage = self.channel.stage("stream", STAGE_BYTES)
        room = STAGE_BYTES // len(publications)
        return [
            _Outflow(self, publication, stage + index * room, room) for index, publication in enumerate(publications)
        ]

    def _waits_for(self) -> set[int]:
        peers = {peer for peer, inflow in self._inflows.items() if inflow.missing or not inflow.has_begun}
        return peers.union(*(outflow.waits_for() for outflow in self._outflows))

    def _taken(self, peer: int) -> None:
        for outflow in self._outflows:
            if peer in outflow.waits_for():
                outflow.taken(peer)
                outflow.advance()
                return

    def _check_total(self, peer: int, packet: bytes) -> None:
        """Raise if the peer sends another amount than this rank expects; its first piece tells."""
        inflow = self._inflows[peer]
        if inflow.has_begun:
            return
        (total,) = TOTAL.unpack_from(packet, HEADER.size)
        if total != inflow.missing:
            who, me = self.channel.name_of([peer]), self.channel.name_of([self.channel.rank])
            raise BackendError(
                f"{who} sends {total} bytes to {me} in {self.name}, and {me} expects {inflow.missing}: the sizes or "
                "dtypes of the tensors differ between the ranks; every rank has to issue the same operations with the "
                "same shapes and dtypes in the same order"
            )

    def _arrived(self, peer: int, offset: int, length: int) -> None:
        inflow = self._inflows[peer]
        inflow.announce(offset, length)
        if not length:
            return
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
