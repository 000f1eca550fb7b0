"""The way between two ranks, measured on a plain connection: latency, bandwidth, and how far their clocks are apart.

One pair at a time, so that none disturbs another. A plain connection and not a process group, so that a way that is
blocked is known by its two ends. Every rank listens at the address that it advertises, on a port that the system
chooses, for as long as the measurement takes; whoever connects has to know a secret from the store.
"""

import json
import secrets
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from gradsync.comm.meeting import wait_for

_PINGS = 50
_CHUNK_BYTES = 256 * 1024
_SENDING_S = 0.2
_MOST_BYTES = 64 * 2**20
_SIZE = struct.Struct("<Q")
_TIME = struct.Struct("<d")
_MOST_PAIRS = 66


@dataclass(frozen=True)
class Card:
    """How a rank can be reached; ``error`` says why it can't, where it knows."""

    rank: int
    host: str
    address: str
    port: int
    secret: str
    error: str = ""

    @property
    def name(self) -> str:
        """Rank, host and address, for people."""
        return f"rank {self.rank} ({self.host}, {self.address})"


@dataclass(frozen=True)
class Way:
    """What was measured between two ranks; or why nothing could be."""

    first: int
    second: int
    latency_s: float = 0.0
    there_bytes_per_s: float = 0.0
    back_bytes_per_s: float = 0.0
    clock_offset_s: float = 0.0
    error: str = ""


class Prober:
    """One rank's part in measuring all pairs."""

    def __init__(self, store: Any, rank: int, world: int, address: str, timeout_s: float, error: str = "") -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._listener: socket.socket | None = None
        port = 0
        if not error:
            try:
                self._listener = socket.create_server((address, 0), family=_family(address))
                self._listener.settimeout(timeout_s)
                port = self._listener.getsockname()[1]
            except OSError as caught:
                error = f"cannot listen on {address}: {caught}"
        self._card = Card(rank, socket.gethostname(), address, port, secrets.token_hex(16), error)
        store.set(f"card/{rank}", json.dumps(asdict(self._card)))
        self.cards: list[Card] = []

    def meet(self) -> None:
        """Read the cards of all ranks."""
        keys = [f"card/{rank}" for rank in range(self._world)]
        wait_for(self._store, keys, timedelta(seconds=self._timeout_s))
        self.cards = [Card(**json.loads(self._store.get(key))) for key in keys]

    def measure(self) -> list[Way]:
        """Measure the pairs, one after the other; every rank calls it and gets all results."""
        chosen = pairs_to_measure([card.host for card in self.cards])
        ways = []
        for number, (first, second) in enumerate(chosen):
            key = f"way/{number}/{first}"
            if self._rank == first:
                way = self._measure_from_here(second)
                self._store.set(key, json.dumps(asdict(way)))
            elif self._rank == second and self._listener is not None and not self.cards[first].error:
                self._answer()
            wait_for(self._store, [key], timedelta(seconds=6 * self._timeout_s + 10 * _SENDING_S))
            ways.append(Way(**json.loads(self._store.get(key))))
        return ways

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()

    def _measure_from_here(self, second: int) -> Way:
        here, there = self.cards[self._rank], self.cards[second]
        if here.error or there.error:
            return Way(self._rank, second, error=here.error or there.error)
        try:
            source = (here.address, 0)
            with socket.create_connection((there.address, there.port), self._timeout_s, source) as connection:
                _prepare(connection, self._timeout_s)
                connection.sendall(there.secret.encode())
                return self._measured(connection, second)
        except OSError as error:
            reason = str(error) or type(error).__name__
            return Way(
                self._rank, second, error=f"{here.name} does not reach {there.name}, port {there.port}: {reason}"
            )

    def _measured(self, connection: socket.socket, second: int) -> Way:
        trips = [_ping(connection) for _ in range(_PINGS)]
        quickest = min(trips)
        there = _send_stream(connection)
        back = _TIME.unpack(_receive(connection, _TIME.size))[0] if _take_stream(connection) else 0.0
        return Way(self._rank, second, statistics.median(trip for trip, _ in trips) / 2, there, back, quickest[1])

    def _answer(self) -> None:
        """Serve the other end; what goes wrong is told by that end."""
        assert self._listener is not None
        deadline = time.monotonic() + self._timeout_s
        try:
            while time.monotonic() < deadline:
                connection, _ = self._listener.accept()
                with connection:
                    _prepare(connection, self._timeout_s)
                    if _receive(connection, len(self._card.secret)).decode(errors="replace") != self._card.secret:
                        continue
                    for _ in range(_PINGS):
                        _receive(connection, 1)
                        connection.sendall(_TIME.pack(time.time()))
                    _take_stream(connection)
                    connection.sendall(_TIME.pack(_send_stream(connection)))
                    return
        except OSError:
            return


def pairs_to_measure(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return all pairs of ranks; of very many those between the first ranks of the hosts, and neighbours."""
    world = len(hosts)
    everything = [(first, second) for first in range(world) for second in range(first + 1, world)]
    if len(everything) <= _MOST_PAIRS:
        return everything
    firsts = sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    between = [(one, other) for position, one in enumerate(firsts) for other in firsts[position + 1 :]]
    if len(between) > _MOST_PAIRS:
        between = list(zip(firsts, firsts[1:], strict=False))
    return sorted({*between, *((rank, rank + 1) for rank in range(world - 1))})


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _prepare(connection: socket.socket, timeout_s: float) -> None:
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _ping(connection: socket.socket) -> tuple[float, float]:
    """The time of a round trip, and how far the other clock is ahead, taking both halves for equal."""
    started, clock = time.perf_counter(), time.time()
    connection.sendall(b"?")
    theirs = _TIME.unpack(_receive(connection, _TIME.size))[0]
    trip_s = time.perf_counter() - started
    return trip_s, theirs - clock - trip_s / 2


def _send_stream(connection: socket.socket) -> float:
    """Send for a moment, and return bytes a second as the other end's answer shows."""
    chunk = bytes(_CHUNK_BYTES)
    started, sent = time.perf_counter(), 0
    while sent == 0 or (time.perf_counter() - started < _SENDING_S and sent < _MOST_BYTES):
        connection.sendall(_SIZE.pack(len(chunk)) + chunk)
        sent += len(chunk)
    connection.sendall(_SIZE.pack(0))
    _receive(connection, 1)
    return sent / (time.perf_counter() - started)


def _take_stream(connection: socket.socket) -> bool:
    while size := _SIZE.unpack(_receive(connection, _SIZE.size))[0]:
        _receive(connection, min(size, _CHUNK_BYTES))
    connection.sendall(b"!")
    return True


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = connection.recv(num_bytes)
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
