"""How the ranks of one host find each other: through the store, then through UNIX sockets.

Every rank listens on an abstract socket (a name in no file system, chosen by the kernel, gone with the
process) and publishes the name and a secret. Each pair of ranks then opens one connection, proves the
secrets, and passes the descriptors of its memory and of a second connection for point-to-point messages.

[Note: Failing to come] A rank that cannot take part (no descriptors left, say) writes why into the store, where those
that wait for it look now and then. The word of a former group that used the same store looks the same until its rank
comes again, which takes it back; so a word has to stand for a while before it is believed.
"""

import contextlib
import errno
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from gradsync.comm.combine import Bytes
from gradsync.comm.remarks import file_limit, has_met_limit
from gradsync.comm.segment import Segment, map_peer
from gradsync.errors import BackendError, GradsyncError

_HELLO = struct.Struct("<16sIQ")  # the secret of the receiver, rank of the sender, size of its segment
_CREDENTIALS = struct.Struct("iii")  # process, user, group
_RETRY_S = 0.01
_LOOK_S = 0.25  # between two looks for ranks that have failed to come
_BELIEVED_S = 1.0
_STRANGER_PATIENCE_S = 5.0  # how long a connection may take to say who it is


@dataclass
class Meeting:
    """What a rank holds of its peers once all have met."""

    sockets: dict[int, socket.socket] = field(default_factory=dict)
    message_sockets: dict[int, socket.socket] = field(default_factory=dict)
    memory: dict[int, Bytes] = field(default_factory=dict)

    def close(self) -> None:
        """Close every connection."""
        for connection in [*self.sockets.values(), *self.message_sockets.values()]:
            connection.close()


def user_of(connection: socket.socket) -> int:
    """The user of the process at the other end of a UNIX socket, as the kernel says."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def host_id() -> str:
    """Equal for two processes that can reach each other through abstract UNIX sockets, and only for those."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespace = os.stat("/proc/self/ns/net")
    return f"{boot}/{namespace.st_dev}/{namespace.st_ino}"


def exchange_hosts(store: Any, rank: int, size: int, timeout: timedelta) -> list[str]:
    """The host id of every rank.

    Raises:
        BackendError: some rank did not come in time, or said that it could not; the message names it.
    """
    store.set(f"host/{rank}", host_id())
    keys = [f"host/{peer}" for peer in range(size)]
    wait_for(store, keys, timeout)
    return [store.get(key).decode() for key in keys]


def meet(store: Any, rank: int, size: int, segment: Segment, timeout: timedelta) -> Meeting:
    """Connect this rank with all others of the group.

    Raises:
        BackendError: some rank did not come in time, or said that it could not; the message names it.
    """
    guest = _Guest(store, rank, size, segment, timeout)
    try:
        for peer in range(rank):
            guest.connect(peer)
        while guest.missing():
            guest.accept()
    except BaseException:
        guest.meeting.close()
        raise
    finally:
        guest.listener.close()
    return guest.meeting


class _Guest:
    """One rank on its way to meet the others: it connects to lower ranks and accepts higher ones."""

    def __init__(self, store: Any, rank: int, size: int, segment: Segment, timeout: timedelta) -> None:
        self.meeting = Meeting()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._store, self._rank, self._size, self._segment = store, rank, size, segment
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._secret = secrets.token_bytes(16)
        self._absences = _Absences(store)
        self.listener.bind("")  # the kernel chooses an unused abstract name
        self.listener.listen(size)
        card = {"address": self.listener.getsockname().hex(), "secret": self._secret.hex()}
        store.set(f"card/{rank}", json.dumps(card))

    def missing(self) -> list[int]:
        return [peer for peer in range(self._size) if peer != self._rank and peer not in self.meeting.sockets]

    def connect(self, peer: int) -> None:
        """Connect to a lower rank; a card that a former group left in the store is passed over."""
        while not self._try_to_connect(peer):
            self._left_s()
            time.sleep(_RETRY_S)

    def _try_to_connect(self, peer: int) -> bool:
        address, secret = self._card_of(peer)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with far:
                connection.settimeout(self._left_s())
                connection.connect(address)
                if user_of(connection) != os.geteuid():
                    raise ConnectionRefusedError(f"rank {peer}'s address belongs to another user's process")
                self._say_hello(connection, secret, [far.fileno()])
                if self._hear_hello(connection, [peer], 1) is not None:
                    self.meeting.message_sockets[peer] = near
        except (ConnectionError, TimeoutError, BlockingIOError):  # the last: so many are waiting to be let in
            pass
        finally:
            if peer not in self.meeting.message_sockets:
                connection.close()
                near.close()
        return peer in self.meeting.message_sockets

    def accept(self) -> None:
        """Take in one connection of a higher rank, if one comes before the next look for those that cannot."""
        self.listener.settimeout(min(self._left_s(), _LOOK_S))
        with contextlib.suppress(ConnectionError, TimeoutError):
            connection, _ = self.listener.accept()
            heard = None
            try:
                if user_of(connection) != os.geteuid():
                    return
                connection.settimeout(min(self._left_s(), _STRANGER_PATIENCE_S))
                heard = self._hear_hello(connection, self.missing(), 2)
                if heard is not None:
                    peer, descriptors = heard
                    self.meeting.message_sockets[peer] = socket.socket(fileno=descriptors[0])
                    self._say_hello(connection, self._card_of(peer)[1], [])
            finally:
                if heard is None:
                    connection.close()

    def _say_hello(self, connection: socket.socket, secret: bytes, descriptors: list[int]) -> None:
        hello = _HELLO.pack(secret, self._rank, self._segment.size)
        socket.send_fds(connection, [hello], [self._segment.descriptor, *descriptors])

    def _hear_hello(
        self, connection: socket.socket, expected: list[int], num_descriptors: int
    ) -> tuple[int, list[int]] | None:
        """Who is there, and the descriptors passed beside that of the memory; None for a stranger."""
        message, descriptors, flags, _ = socket.recv_fds(
            connection, _HELLO.size, num_descriptors, socket.MSG_CMSG_CLOEXEC
        )
        secret, peer, num_bytes = _HELLO.unpack(message) if len(message) == _HELLO.size else (b"", -1, 0)
        is_friend = secret == self._secret and peer in expected
        if is_friend and len(descriptors) == num_descriptors:
            self.meeting.memory[peer] = map_peer(descriptors[0], num_bytes)
            self.meeting.sockets[peer] = connection
            return peer, descriptors[1:]
        for descriptor in descriptors:
            os.close(descriptor)
        if is_friend and flags & socket.MSG_CTRUNC:  # this process had no room for them
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return None

    def _card_of(self, peer: int) -> tuple[bytes, bytes]:
        key = f"card/{peer}"
        wait_for(self._store, [key], timedelta(seconds=self._left_s()))
        card = json.loads(self._store.get(key))
        return bytes.fromhex(card["address"]), bytes.fromhex(card["secret"])

    def _left_s(self) -> float:
        self._absences.check(self.missing())
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise BackendError(
                "the ranks of a shared-memory group did not meet in time: "
                f"rank {', '.join(map(str, self.missing()))} did not connect; look at the output of these "
                "ranks"
            )
        return left_s


class _Absences:
    """What ranks have said of why they cannot come; see [Note: Failing to come]."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._looks_again_s = time.monotonic() + _LOOK_S
        self._since_s: dict[int, float] = {}

    def check(self, ranks: Iterable[int]) -> None:
        """Raise what one of these ranks has said, if it has said so for a while."""
        now = time.monotonic()
        if now < self._looks_again_s:
            return
        self._looks_again_s = now + _LOOK_S
        for rank in ranks:
            key = _absence(rank)
            if not self._store.check([key]):
                self._since_s.pop(rank, None)
            elif now - self._since_s.setdefault(rank, now) >= _BELIEVED_S:
                raise BackendError(f"the group cannot be made: {self._store.get(key).decode()}")


@contextlib.contextmanager
def telling_absence(store: Any, rank: int, name: str) -> Iterator[None]:
    """Have the others told if this rank, called ``name``, fails inside.

    Raises:
        BackendError: for what the system has refused; everything else is raised as it is.
    """
    with contextlib.suppress(RuntimeError):
        store.delete_key(_absence(rank))
    try:
        yield
    except Exception as error:
        raised = _as_backend_error(error, name)
        with contextlib.suppress(RuntimeError):
            store.set(_absence(rank), str(raised) if isinstance(raised, BackendError) else f"{name} failed: {raised}")
        if raised is error:
            raise
        raise raised from error


def _absence(rank: int) -> str:
    return f"absent/{rank}"


def _as_backend_error(error: Exception, name: str) -> Exception:
    has_too_many = has_met_limit(error)
    if isinstance(error, GradsyncError) or not (has_too_many or isinstance(error, OSError)):
        return error
    remedy = f"; {_few_descriptors()}" if has_too_many else ""
    return BackendError(f"{name} cannot take part in a group: {error}{remedy}")


def _few_descriptors() -> str:
    return (
        "every peer takes three or four descriptors in each group, and this process may have "
        f"{file_limit()} files open: raise the limit (ulimit -n), or destroy groups that are not needed any more"
    )


def wait_for(store: Any, keys: Sequence[str], timeout: timedelta) -> None:
    """Wait until every rank has set its key, which ends in its number.

    Raises:
        BackendError: some did not in time, or said that they could not come; the message names the ranks.
    """
    absences, until = _Absences(store), time.monotonic() + timeout.total_seconds()
    missing = list(keys)
    while missing := [key for key in missing if not store.check([key])]:
        ranks = [key.rpartition("/")[2] for key in missing]
        absences.check(map(int, ranks))
        if time.monotonic() > until:
            raise BackendError(
                f"nothing was heard of rank {', '.join(ranks)} within {timeout.total_seconds():g} s: the "
                "group has to be started by all of its ranks; look at the output of these ranks, or raise the "
                "timeout"
            )
        time.sleep(_RETRY_S)
