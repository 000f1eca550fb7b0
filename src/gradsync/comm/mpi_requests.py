"""Waiting for MPI: requests are polled, so that a wait can end by a time limit or another rank's word.

[Note: Polling] MPI moves data only while somebody calls it, and a call that waits knows no time limit. So every
operation is started without waiting and then asked, again and again, whether it is over: at once and often for
a moment, then with short pauses that leave the core to others.

[Note: Notices] A rank that has waited for a while says so in the store, and looks there for the reason of a
failure elsewhere. So the one whose time is up first can tell who was in the same operation and who was not.
"""

import contextlib
import os
import threading
import time
from typing import Any

from gradsync.errors import BackendError, GradsyncError

SPIN_S = 100e-6  # how long a wait looks without a pause
_PAUSE_S = 50e-6
_NOTICE_S = 1.0
_MARGIN_S = 0.3  # for a notice to arrive

# Requests that will never be complete, with the memory that MPI may still write: kept as long as the process.
_abandoned: list[Any] = []


class Notices:
    """What the ranks of a group tell each other through the store when an operation takes long."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store = store
        self.rank = rank
        self._num_ranks = num_ranks
        self.given_up: GradsyncError | None = None
        """Why this rank itself has given the group up."""

    def waiting(self, what: str) -> None:
        """Say what this rank waits for ("" for nothing)."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"waiting/{self.rank}", what)

    def failed(self, reason: GradsyncError) -> None:
        """Say why the group is of no use any more, and end what waits here; the first reason stays."""
        self.given_up = self.given_up or reason
        # The store may be silent, and whoever gives up is in a hurry.
        teller = threading.Thread(target=self._tell_failure, args=(str(reason),), daemon=True)
        teller.start()
        teller.join(_NOTICE_S)

    def _tell_failure(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("failure", "", reason)

    def reason(self) -> str | None:
        """Why the group has failed on another rank, if it has."""
        return self._read("failure")

    def elsewhere(self, what: str) -> str:
        """Who is not in the operation ``what``, in words."""
        told = {rank: self._read(f"waiting/{rank}") for rank in range(self._num_ranks) if rank != self.rank}
        parts = [f"rank {rank} waits in {other}" for rank, other in told.items() if other and other != what]
        silent = [str(rank) for rank, other in told.items() if not other]
        if silent:
            parts.append(f"nothing was heard of rank {', '.join(silent)}")
        return "; ".join(parts) or "all ranks are in it, so the network between them does not carry it"

    def _read(self, key: str) -> str | None:
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                return str(self._store.get(key).decode()) or None
        return None


class Waiter:
    """Waits for the requests of one group."""

    def __init__(self, notices: Notices, num_local_ranks: int) -> None:
        self._notices = notices
        self._spin_s = SPIN_S if num_local_ranks <= len(os.sched_getaffinity(0)) else 0.0

    def wait(self, request: Any, what: str, timeout_s: float, kept: Any) -> None:
        """Wait until a request is complete; ``kept`` is what MPI works on.

        Raises:
            BackendError: it is not complete in time, or another rank has given the group up.
            GradsyncError: this rank has given the group up, for this reason.
        """
        try:
            self._wait(request, what, timeout_s)
        except BaseException:
            keep_forever(request, kept)
            raise

    def _wait(self, request: Any, what: str, timeout_s: float) -> None:
        started = now = time.monotonic()
        notice_s = min(_NOTICE_S, timeout_s / 4)
        notice_at = started + notice_s
        has_told = False
        while not request.Test():
            if self._notices.given_up:
                raise self._notices.given_up
            if now - started < self._spin_s:
                os.sched_yield()
            else:
                time.sleep(_PAUSE_S)
            now = time.monotonic()
            if now >= notice_at:
                self._look_around(what, has_told)
                has_told, notice_at = True, now + notice_s
            if now - started > timeout_s:
                time.sleep(notice_s + _MARGIN_S)  # who came later than this rank has told by then
                raise BackendError(
                    f"{what} timed out after {timeout_s:g} s, seen by rank {self._notices.rank}: "
                    f"{self._notices.elsewhere(what)}"
                )
        if has_told:
            self._notices.waiting("")

    def _look_around(self, what: str, has_told: bool) -> None:
        if not has_told:
            self._notices.waiting(what)
        reason = self._notices.reason()
        if reason is not None:
            raise BackendError(f"another rank gave up while rank {self._notices.rank} was in {what}: {reason}")


def keep_forever(request: Any, kept: Any) -> None:
    """Give a request up: MPI may write to its memory at any time, so that has to stay."""
    _abandoned.append((request, kept))


def has_abandoned() -> bool:
    """Whether MPI still holds operations of this process that will never end."""
    return bool(_abandoned)
