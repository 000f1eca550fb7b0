"""Signals between the ranks of one host: small packets over UNIX sockets, one socket a pair of ranks.

A packet says what its sender did (see ``Kind``), carries small payloads itself and points into the sender's
segment for larger ones. The system call that carries it also orders the memory accesses of both sides. A peer
that dies closes its sockets, whatever killed it, so its death is seen at once and not by a time-out. Knows
nothing of tensors and operations.

[Note: Waiting] A waiting rank looks for packets for a while before it sleeps in the kernel: waking a sleeping
process costs several times as much as a packet. Between two looks it offers its core to whoever wants it;
without that, two ranks that the kernel has put on one core would wait for each other's looking.

[Note: Never stuck in sending] A send that finds the socket full takes in what has arrived meanwhile. Two
ranks that send to each other therefore cannot block each other.
"""

import contextlib
import os
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum
from time import monotonic
from typing import Any

HEADER = struct.Struct("<BxxxIQQQ")  # kind, sequence number, signature, first and second value
TOTAL = struct.Struct("<Q")  # what the first piece carries: how many bytes there are in all
EAGER_BYTES = 32 * 1024  # the most that a packet carries itself
_PACKET_BYTES = HEADER.size + EAGER_BYTES
_BUFFER_BYTES = 1024 * 1024
_LONGEST_SLEEP_S = 3600.0


class Kind(IntEnum):
    """What a packet says."""

    EAGER = 1  # here is my whole contribution
    PIECE = 2  # at this offset of my segment lie so many bytes for you
    TAKEN = 3  # I have read the oldest piece that you announced
    STEP = 4  # my part of this step is done; my next piece lies at this offset; twice the size, and whether in place
    OFFER = 5  # a message of so many bytes for you begins; its pieces follow
    ABORT = 6  # I have given up, for the reason in the payload
    GOODBYE = 7  # I am leaving the group and have nothing more to say


def announced_bytes(packet: bytes) -> int | None:
    """Return how many bytes the sender of an operation's first packet has in all; None if the packet does not say."""
    kind, *_, second = HEADER.unpack_from(packet)
    if kind == Kind.EAGER:
        return len(packet) - HEADER.size
    if kind == Kind.STEP:
        return int(second) >> 1
    if kind == Kind.PIECE and len(packet) == HEADER.size + TOTAL.size:
        return int(TOTAL.unpack_from(packet, HEADER.size)[0])
    return None


class WireError(Exception):
    """Why an operation cannot go on; ``channel`` says it in words."""


class PeerLostError(WireError):
    """A peer closed its connection; ``ranks`` are the ones that are gone."""

    def __init__(self, ranks: Sequence[int], has_said_goodbye: bool) -> None:
        super().__init__(ranks)
        self.ranks = list(ranks)
        self.has_said_goodbye = has_said_goodbye


class PeerAbortedError(WireError):
    """A peer has given up and said why."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank
        self.reason = reason


class WaitTimeoutError(WireError):
    """The deadline passed; ``missing`` are the ranks that were still waited for."""

    def __init__(self, missing: Sequence[int]) -> None:
        super().__init__(missing)
        self.missing = list(missing)


class WireClosedError(WireError):
    """This side has closed the wire (the group was destroyed or aborted)."""


class Wire:
    """This rank's connections to all of its peers."""

    def __init__(self, sockets: dict[int, socket.socket], spin_s: float) -> None:
        self.peers = sorted(sockets)
        self.spin_s = spin_s
        self._sockets = sockets
        self._inboxes: dict[int, deque[bytes]] = {peer: deque() for peer in sockets}
        self._gone: set[int] = set()  # left after a goodbye
        self._is_closed = False
        self.is_inherited = False  # by a forked child, which cannot use it
        self._send_lock = threading.Lock()
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # wakes a waiting thread of this process
        self._poller = select.poll()
        self._poller.register(self._alarm, select.POLLIN)
        self._peer_of = {}
        for peer, connection in sockets.items():
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            self._poller.register(connection, select.POLLIN)
            self._peer_of[connection.fileno()] = peer
        _close_in_children(self)

    # -- sending

    def try_send(self, peer: int, header: bytes, payload: Any = b"") -> bool:
        """Send without waiting; False if the peer's buffer is full.

        Raises:
            PeerLostError: the peer is gone.
        """
        try:
            self._sockets[peer].sendmsg((header, payload))
        except BlockingIOError:
            return False
        except OSError as error:
            if self._is_closed:
                raise WireClosedError from error
            raise self._lost(peer) from error
        return True

    def send(self, peer: int, header: bytes, payload: Any = b"", deadline: float | None = None) -> None:
        """Send, waiting for room if need be (see [Note: Never stuck in sending])."""
        while not self.try_send(peer, header, payload):
            self._sleep([peer], deadline, room_for=[peer])

    # -- receiving

    def collect(self, peers: Sequence[int], deadline: float | None) -> list[bytes]:
        """Wait until every one of ``peers`` has sent a packet; take one of each, in the order of ``peers``.

        Raises:
            WaitTimeoutError: the deadline passed.
            PeerLostError: a peer died, or one that is waited for left.
            PeerAbortedError: a peer gave up.
        """
        inboxes = self._inboxes
        missing = [peer for peer in peers if not inboxes[peer]]
        while missing:
            self._wait(missing, deadline)
            missing = [peer for peer in missing if not inboxes[peer]]
        return [inboxes[peer].popleft() for peer in peers]

    def receive_any(self, peers: Iterable[int], deadline: float | None) -> tuple[int, bytes]:
        """Wait for a packet from any of ``peers``; raises like ``collect``."""
        peers = list(peers)
        while True:
            for peer in peers:
                if self._inboxes[peer]:
                    return peer, self._inboxes[peer].popleft()
            self._wait(peers, deadline)

    def pump(self, deadline: float | None, room_for: Iterable[int] = ()) -> None:
        """Sleep until a packet, room at a peer of ``room_for``, a call of ``wake`` or the deadline.

        For a thread that serves all peers at once; raises like ``collect``, but for the time-out.
        """
        with contextlib.suppress(WaitTimeoutError):
            self._sleep([], deadline, room_for)

    def wake(self) -> None:
        """Let ``pump`` on another thread return."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._alarm, 1)

    def take(self, peer: int) -> bytes | None:
        """The oldest packet of a peer that was taken in and not yet handed out."""
        return self._inboxes[peer].popleft() if self._inboxes[peer] else None

    def has_left(self, peer: int) -> bool:
        """Whether the peer has said goodbye."""
        return peer in self._gone

    def _wait(self, peers: Sequence[int], deadline: float | None) -> None:
        """Take in at least one packet; ``peers`` are those that have to send one."""
        ready = self._poller.poll(0)
        if not ready and self.spin_s:
            until = monotonic() + self.spin_s
            while not ready and monotonic() < until:
                os.sched_yield()
                ready = self._poller.poll(0)
        if ready:
            self._take_in(ready)
        else:
            self._sleep(peers, deadline)
        if self._gone and not self._gone.isdisjoint(peers):
            left = [peer for peer in peers if peer in self._gone and not self._inboxes[peer]]
            if left:
                raise PeerLostError(left, has_said_goodbye=True)

    def _sleep(self, peers: Sequence[int], deadline: float | None, room_for: Iterable[int] = ()) -> None:
        """Sleep until there is something to take in (or room to send), at most until the deadline."""
        left_s = _LONGEST_SLEEP_S if deadline is None else min(deadline - monotonic(), _LONGEST_SLEEP_S)
        if left_s <= 0:
            raise WaitTimeoutError(peers)
        crowded = [self._sockets[peer] for peer in room_for]
        for connection in crowded:
            self._poller.modify(connection, select.POLLIN | select.POLLOUT)
        try:
            ready = self._poller.poll(left_s * 1000 + 1)
        finally:
            for connection in crowded:
                self._poller.modify(connection, select.POLLIN)
        self._take_in(ready)

    def _take_in(self, ready: list[tuple[int, int]]) -> None:
        for descriptor, events in ready:
            if descriptor == self._alarm:
                if self._is_closed:
                    raise WireClosedError
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._alarm)
            elif events & ~select.POLLOUT:
                self._take_in_from(self._peer_of[descriptor])

    def _take_in_from(self, peer: int) -> None:
        try:
            packet = self._sockets[peer].recv(_PACKET_BYTES)
        except (BlockingIOError, ConnectionResetError):
            return  # a reset is reported once, before what is left to read; the end of file follows
        except OSError:
            packet = b""
        if not packet:
            if peer not in self._gone:
                raise self._lost(peer)
            self._poller.unregister(self._sockets[peer])
        elif packet[0] == Kind.ABORT:
            raise PeerAbortedError(peer, packet[HEADER.size :].decode(errors="replace"))
        elif packet[0] == Kind.GOODBYE:
            self._gone.add(peer)
        else:
            self._inboxes[peer].append(packet)

    def _lost(self, peer: int) -> Exception:
        """What to raise when a connection has broken: the reason that the peer left behind, if it did."""
        while True:
            try:
                packet = self._sockets[peer].recv(_PACKET_BYTES)
            except ConnectionResetError:
                continue
            except OSError:
                packet = b""
            if not packet:
                return PeerLostError([peer], has_said_goodbye=peer in self._gone)
            if packet[0] == Kind.ABORT:
                return PeerAbortedError(peer, packet[HEADER.size :].decode(errors="replace"))
            if packet[0] == Kind.GOODBYE:
                self._gone.add(peer)

    # -- leaving

    def abort(self, reason: str) -> None:
        """Tell every peer that this rank has given up, and close."""
        self._farewell(Kind.ABORT, reason.encode()[:EAGER_BYTES])

    def goodbye(self) -> None:
        """Tell every peer that this rank leaves in peace, and close."""
        self._farewell(Kind.GOODBYE, b"")

    def _farewell(self, kind: Kind, payload: bytes) -> None:
        with self._send_lock:
            if self._is_closed:
                return
            self._is_closed = True
        header = HEADER.pack(kind, 0, 0, 0, 0)
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.sendmsg((header, payload))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        self.wake()

    def close(self) -> None:
        """Give the descriptors back; no thread may be waiting any more."""
        self.goodbye()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        if self._alarm >= 0:
            os.close(self._alarm)
            self._alarm = -1


_open_wires: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _close_in_children(wire: Any) -> None:
    _open_wires.add(wire)


def close_all_in_child() -> None:
    """Close every wire that a forked child has inherited.

    A child that outlives its parent (a data loader's worker) would otherwise keep the connection open and
    hide the death of the parent from its peers.
    """
    for wire in list(_open_wires):
        wire._is_closed = wire.is_inherited = True
        wire._close_descriptors()


os.register_at_fork(after_in_child=close_all_in_child)
