"""Point-to-point messages of a shared-memory group: send, receive, receive from anybody.

Messages have their own wire and thread, beside the collectives, because a send must not keep the queue of the
collectives waiting until somebody receives it. Small messages travel in a packet. Larger ones are announced
piece by piece, at most two pieces ahead of the receiver, out of the tensor itself if it lies in the segment
and else out of a staging block.

Messages of one pair of ranks with one tag arrive in the order in which they were sent.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import numpy as np

from gradsync.comm.channel import Channel
from gradsync.comm.combine import Bytes
from gradsync.comm.wire import EAGER_BYTES, HEADER, Kind, Wire
from gradsync.comm.work import PythonWork
from gradsync.errors import BackendError

PIECE_BYTES = 1024 * 1024
_KEPT_BLOCKS = 4  # staging blocks that are kept for the next message
_TAG_MASK = 2**64 - 1
_JOIN_S = 10.0


class MessageWork(PythonWork):
    """A message that is sent or received."""

    def __init__(self, name: str, result: Any, data: Bytes, peer: int | None, tag: int, timeout_s: float) -> None:
        super().__init__(result)
        self.name = name
        self.data = data
        self.peer = peer  # None: anybody
        self.tag = tag & _TAG_MASK
        self.deadline = monotonic() + timeout_s
        self.after: Callable[[], None] | None = None  # what is left to do once the data is there
        self.source: int | None = None

    def source_rank(self) -> int:
        """The rank that a message came from."""
        return super().source_rank() if self.source is None else self.source

    _source_rank = source_rank


@dataclass
class _Outgoing:
    """A large message on its way to a peer."""

    work: MessageWork
    number: int
    place: int  # where the data, or the staging block, lies in the segment
    is_staged: bool
    sent_bytes: int = 0
    num_pieces: int = 0
    untaken: deque[int] = field(default_factory=deque)  # lengths of the pieces that the peer has not read


@dataclass
class _Incoming:
    """A message that a peer has begun to send."""

    peer: int
    number: int
    tag: int
    num_bytes: int
    payload: Bytes | None = None  # all of it, if it is small
    pieces: deque[tuple[int, int]] = field(default_factory=deque)
    work: MessageWork | None = None  # the receive that takes it
    received_bytes: int = 0


class Messages:
    """The point-to-point side of a group."""

    def __init__(self, channel: Channel, wire: Wire) -> None:
        self._channel = channel
        self._wire = wire
        self._lock = threading.Lock()  # guards everything below
        self._thread: threading.Thread | None = None
        self._looks_again_at: float | None = 0.0  # when the thread does so by itself; None: not before a packet
        self._next_number = dict.fromkeys(wire.peers, 0)
        self._backlog: dict[int, deque[tuple[bytes, Any, MessageWork | None]]] = {peer: deque() for peer in wire.peers}
        self._outgoing: dict[tuple[int, int], _Outgoing] = {}  # by peer and number
        self._incoming: dict[tuple[int, int], _Incoming] = {}
        self._unmatched: list[_Incoming] = []  # messages that no receive has taken yet, in order of arrival
        self._receives: list[MessageWork] = []  # receives that have no message yet, in order of issue
        self._kept_blocks: list[int] = []
        self._done: list[MessageWork] = []

    def send(self, work: MessageWork) -> MessageWork:
        """Send ``work.data`` to ``work.peer``."""
        return self._issue(work, self._send)

    def receive(self, work: MessageWork) -> MessageWork:
        """Receive into ``work.data`` from ``work.peer``, or from anybody."""
        return self._issue(work, self._receive)

    def close(self) -> None:
        """Wait for the thread to end; the wire must have been closed."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        self._fail_all(self._channel.failure or BackendError("the group was destroyed"))

    def _issue(self, work: MessageWork, begin: Callable[[MessageWork], None]) -> MessageWork:
        self._channel.check(work.name)
        try:
            with self._lock:
                begin(work)
        except BaseException as error:
            raise self._channel.failed(work.name, error)  # noqa: B904 - which says itself what caused it
        self._complete_done()
        return work

    # -- sending

    def _send(self, work: MessageWork) -> None:
        peer = work.peer
        assert peer is not None
        if peer == self._channel.rank:
            payload = work.data.copy()
            self._arrived(_Incoming(peer, 0, work.tag, payload.size, payload))
            self._done.append(work)
            return
        number = self._next_number[peer]
        self._next_number[peer] += 1
        if work.data.size <= EAGER_BYTES:
            self._transmit(peer, HEADER.pack(Kind.EAGER, number, work.tag, 0, 0), work.data, work)
            return
        place = self._channel.offset_of(work.data)
        is_staged = place is None
        outgoing = _Outgoing(work, number, self._take_block() if place is None else place, is_staged)
        self._outgoing[peer, number] = outgoing
        self._need_thread(work.deadline)
        self._transmit(peer, HEADER.pack(Kind.OFFER, number, work.tag, work.data.size, 0))
        self._advance(outgoing)

    def _transmit(self, peer: int, header: bytes, payload: Any = b"", work: MessageWork | None = None) -> None:
        """Send a packet now or when there is room; then ``work`` is done."""
        if self._backlog[peer] or not self._wire.try_send(peer, header, payload):
            self._backlog[peer].append((header, payload, work))
            self._need_thread(None)
        elif work is not None:
            self._done.append(work)

    def _flush(self) -> None:
        for peer, backlog in self._backlog.items():
            while backlog and self._wire.try_send(peer, *backlog[0][:2]):
                work = backlog.popleft()[2]
                if work is not None:
                    self._done.append(work)

    def _advance(self, outgoing: _Outgoing) -> None:
        data = outgoing.work.data
        while outgoing.sent_bytes < data.size and len(outgoing.untaken) < 2:
            offset, length = outgoing.place, data.size
            if outgoing.is_staged:
                length = min(PIECE_BYTES, data.size - outgoing.sent_bytes)
                offset += outgoing.num_pieces % 2 * PIECE_BYTES
                piece = data[outgoing.sent_bytes : outgoing.sent_bytes + length]
                np.copyto(self._channel.segment.bytes[offset : offset + length], piece)
            outgoing.sent_bytes += length
            outgoing.num_pieces += 1
            outgoing.untaken.append(length)
            header = HEADER.pack(Kind.PIECE, outgoing.number, outgoing.work.tag, offset, length)
            self._transmit(self._peer_of(outgoing), header)

    def _peer_of(self, outgoing: _Outgoing) -> int:
        assert outgoing.work.peer is not None
        return outgoing.work.peer

    def _taken(self, outgoing: _Outgoing) -> None:
        outgoing.untaken.popleft()
        self._advance(outgoing)
        if not outgoing.untaken:
            del self._outgoing[self._peer_of(outgoing), outgoing.number]
            if outgoing.is_staged:
                self._give_back_block(outgoing.place)
            self._done.append(outgoing.work)

    def _take_block(self) -> int:
        return self._kept_blocks.pop() if self._kept_blocks else self._channel.segment.take(2 * PIECE_BYTES)

    def _give_back_block(self, block: int) -> None:
        if len(self._kept_blocks) < _KEPT_BLOCKS:
            self._kept_blocks.append(block)
        else:
            self._channel.segment.give_back(block)

    # -- receiving

    def _receive(self, work: MessageWork) -> None:
        for incoming in self._unmatched:
            if _fits(work, incoming):
                self._unmatched.remove(incoming)
                self._match(work, incoming)
                return
        self._receives.append(work)
        self._need_thread(work.deadline)

    def _read(self, peer: int, packet: bytes) -> None:
        kind, number, tag, first, second = HEADER.unpack_from(packet)
        if kind == Kind.EAGER:
            payload = np.frombuffer(packet, dtype=np.uint8, offset=HEADER.size)
            self._arrived(_Incoming(peer, number, tag, payload.size, payload))
        elif kind == Kind.OFFER:
            self._incoming[peer, number] = incoming = _Incoming(peer, number, tag, first)
            self._arrived(incoming)
        elif kind == Kind.PIECE:
            self._incoming[peer, number].pieces.append((first, second))
            self._progress(self._incoming[peer, number])
        else:
            self._taken(self._outgoing[peer, number])

    def _arrived(self, incoming: _Incoming) -> None:
        for work in self._receives:
            if _fits(work, incoming):
                self._receives.remove(work)
                self._match(work, incoming)
                return
        self._unmatched.append(incoming)

    def _match(self, work: MessageWork, incoming: _Incoming) -> None:
        if work.data.size != incoming.num_bytes:
            self._receives.append(work)  # where it is found to be failed
            raise BackendError(
                f"{work.name}: the message from {self._channel.name_of([incoming.peer])} has "
                f"{incoming.num_bytes} bytes, the tensor to receive it has {work.data.size}; they must have "
                "the same size and dtype"
            )
        work.source = incoming.peer
        incoming.work = work
        self._progress(incoming)

    def _progress(self, incoming: _Incoming) -> None:
        """Move what is there of a message to where it belongs."""
        work = incoming.work
        if work is None:
            return
        if incoming.payload is not None:
            np.copyto(work.data, incoming.payload)
            self._done.append(work)
            return
        memory = self._channel.memory[incoming.peer]
        while incoming.pieces:
            offset, length = incoming.pieces.popleft()
            start = incoming.received_bytes
            np.copyto(work.data[start : start + length], memory[offset : offset + length])
            incoming.received_bytes += length
            self._transmit(incoming.peer, HEADER.pack(Kind.TAKEN, incoming.number, incoming.tag, 0, 0))
        if incoming.received_bytes == incoming.num_bytes:
            del self._incoming[incoming.peer, incoming.number]
            self._done.append(work)

    # -- the thread

    def _need_thread(self, deadline: float | None) -> None:
        """See that the thread looks at the wire, and no later than at the deadline for what takes too "
        "long."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="gradsync-shm-messages", daemon=True)
            self._thread.start()
        elif threading.current_thread() is not self._thread and (
            deadline is None or self._looks_again_at is None or deadline < self._looks_again_at
        ):
            self._wire.wake()

    def _serve(self) -> None:
        try:
            while True:
                self._serve_once()
                self._complete_done()
        except Exception as error:
            self._fail_all(self._channel.fail("the exchange of messages", error))

    def _serve_once(self) -> None:
        with self._lock:
            self._check_waiting()
            deadlines = [work.deadline for work in self._waiting()]
            self._looks_again_at = min(deadlines, default=None)
            crowded = [peer for peer, backlog in self._backlog.items() if backlog]
        self._wire.pump(self._looks_again_at, crowded)
        with self._lock:
            for peer in self._wire.peers:
                while (packet := self._wire.take(peer)) is not None:
                    self._read(peer, packet)
            self._flush()

    def _waiting(self) -> list[MessageWork]:
        return [*self._receives, *(outgoing.work for outgoing in self._outgoing.values())]

    def _check_waiting(self) -> None:
        """Raise if something waits in vain."""
        now = monotonic()
        left = {peer for peer in self._wire.peers if self._wire.has_left(peer)}
        for work in self._waiting():
            candidates = set(self._wire.peers) if work.peer is None else {work.peer}
            if candidates and candidates <= left:
                raise BackendError(
                    f"{work.name} cannot be completed: {self._channel.name_of(sorted(candidates))} left the group"
                )
            if work.deadline <= now:
                raise BackendError(
                    f"{work.name} timed out on {self._channel.name_of([self._channel.rank])}: the other side "
                    "is late, stuck, or has not issued its part"
                )

    def _complete_done(self) -> None:
        with self._lock:
            done, self._done = self._done, []
        for work in done:
            _complete(work, None)

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            failed = self._waiting()
            failed += [incoming.work for incoming in self._incoming.values() if incoming.work is not None]
            failed += [work for backlog in self._backlog.values() for *_, work in backlog if work is not None]
            self._receives.clear()
            self._outgoing.clear()
            self._incoming.clear()
            for backlog in self._backlog.values():
                backlog.clear()
        for work in failed:
            _complete(work, error)


def _fits(work: MessageWork, incoming: _Incoming) -> bool:
    return work.tag == incoming.tag and work.peer in (None, incoming.peer)


def _complete(work: MessageWork, error: BaseException | None) -> None:
    if error is None and work.after is not None:
        work.after()
    work.complete(error)
    if work.has_future:
        # its callbacks may wait for other messages, which takes the thread that brought this one
        threading.Thread(target=work.resolve, daemon=True).start()
