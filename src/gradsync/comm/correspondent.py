"""What this rank hears from the others, and what it tells them; all of it through the ledger.

Whoever finds that another rank has failed, or that the ranks have lost each other, leaves the error in ``error``: it is
the same on all ranks. What is heard of is taken in by the thread that reads the ledger (``watch``), or here, while an
answer is waited for.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gradsync.comm.aftermath import is_aftermath
from gradsync.comm.diagnosis import HAS_ENDED, has_destroyed, name_of
from gradsync.comm.ledger import Event, Ledger, Place
from gradsync.comm.remarks import in_a_line
from gradsync.comm.store import is_served_by_launcher
from gradsync.errors import GradsyncError, RankFailedError, StalledError

HURRY_S = 0.05
_ANSWER_S = 1.5  # three looks of the rank that is asked

_POSTED_S = 1.0  # how long after the loss of a connection the cause may take to appear
_NOTED_S = 1.0
_SPOKEN_S = 2.0  # how long a failure waits for the others to have said it, too: a launcher ends them when it sees it
_STORE_S = 2.0  # how much longer the store itself may take


class Correspondent:
    """One rank of the default group, as it talks with the others; a subclass knows where this rank is."""

    def __init__(self, ledger: Ledger) -> None:
        self.rank, self.world = ledger.rank, ledger.world
        self.error: GradsyncError | None = None
        self.has_raised = False
        self.is_deaf = False
        """The store is gone, and with it all that the ranks could tell each other."""
        self._loss: Exception | None = None
        """How the store was lost, unless it left with its rank in peace."""
        self._left: set[int] = set()
        self._destroyed: dict[int, str] = {}
        """Who has destroyed its group and may go on with something else, and the exception on its way then, if any."""
        self._unspoken: dict[int, float] = {}
        """The failures heard of and not yet raised by this rank, and when that was."""
        self._ledger = ledger
        self._hurries = 0

    def where(self) -> Place:
        """Return where this rank is now."""
        raise NotImplementedError

    def spot(self) -> str:
        """Return the same in a few words."""
        raise NotImplementedError

    def report(self, error: BaseException) -> None:
        """Tell all ranks that an exception ends this one, and give them a moment to hear it and say so."""
        text = in_a_line(error)
        others = [rank for rank in range(self.world) if rank != self.rank and rank not in self.gone]
        with self._hurry():
            number = self._ledger.post(Event("failure", self.rank, text, self.spot()))
            self._poll(_SPOKEN_S, lambda: not others or self.is_deaf or self._ledger.have_noted(number, others))

    def acknowledge(self) -> None:
        """Let the ranks that have failed end, since this one has said why it ends, too."""
        for number in list(self._unspoken):
            if self._unspoken.pop(number, None) is not None and not self.is_deaf:  # two threads come here
                self._ledger.note(number)

    def leave(self, takes_store_along: bool) -> None:
        """Tell all ranks that this one has ended in peace; if the store ends with it, they must not look any more."""
        number = self._ledger.post(Event("left", self.rank, "store" if takes_store_along else ""))
        if takes_store_along:
            self._poll(_NOTED_S, lambda: self._is_let_go(number))

    def see_off(self) -> None:
        """Give the others a moment to leave before the store ends with this rank, whose watch has stopped."""
        self._poll(_NOTED_S, lambda: not self._others_here())

    def _is_let_go(self, number: int) -> bool:
        """Whether all others have ended themselves or know that this rank has, whose watch has stopped."""
        here = self._others_here()
        return not here or self._ledger.have_noted(number, here)

    def _others_here(self) -> list[int]:
        """The other ranks that have not left."""
        self._read()
        return [rank for rank in range(self.world) if rank != self.rank and rank not in self._left]

    def raised(self) -> GradsyncError:
        """Return the error for raising it: a new object, since it may be raised many times and on several threads."""
        assert self.error is not None
        self.has_raised = True
        return type(self.error)(str(self.error))

    def forget(self) -> None:
        """Forget an error, because the ranks have agreed to go on."""
        self.error, self.has_raised = None, False

    def behind(self, error: BaseException, members: Sequence[int]) -> BaseException:
        """Return what to raise for an error of a collective: what stands behind it (see ``explain``), or itself."""
        if error is self.error:  # for which this rank has ended a group
            return self.raised()
        if isinstance(error, RankFailedError | StalledError) or not is_aftermath(error):
            return error
        return self.explain(error, members)

    def explain(self, error: BaseException, members: Sequence[int]) -> BaseException:
        """Return what stands behind an error that may only be the echo of another rank's, or the error itself.

        ``members`` are asked whether they are still there, if nobody has told of a failure.
        """
        if self.error is None and not self.is_deaf:
            with self._hurry():
                self._poll(_POSTED_S, lambda: self.error is not None or self.is_deaf)
                if self.error is None and not self.is_deaf and members:
                    self.error = self._missing_in_time(error, members)
        if self.error is None and self._loss is not None and 0 in members:
            self.error = self._lost_with_the_store(error)
        return error if self.error is None else self.raised()

    def _missing_in_time(self, error: BaseException, members: Sequence[int]) -> GradsyncError | None:
        """Ask who is still there, though not for ever: on a host that is cut off the store never answers."""
        found: list[GradsyncError | None] = []
        asking = threading.Thread(target=lambda: found.append(self._missing(error, members)), daemon=True)
        asking.start()
        asking.join(_ANSWER_S + _STORE_S)
        if found:
            return found[0]
        self.is_deaf = True
        return RankFailedError(
            f"rank {self.rank} on host {socket.gethostname()}: lost in {self.spot()}: neither the "
            f"other ranks nor the store answer, so this host's network is cut off, or rank 0's host is gone ({error})"
        )

    def _missing(self, error: BaseException, members: Sequence[int]) -> GradsyncError | None:
        """Ask who is still there, after a connection was lost and nobody has said why."""
        try:
            number = self._ledger.post(Event("inquiry", self.rank, members=tuple(members)))
            places: dict[int, Place] = {}
            self._poll(
                _ANSWER_S, lambda: len(places.update(self._ledger.answers(number, members)) or places) == len(members)
            )
        except Exception as loss:  # noqa: BLE001 - the store went down too, so there is no more to be known
            self._loss, self.is_deaf = loss, True
            return None
        silent = [rank for rank in members if rank not in places]
        if not silent:
            return None
        how = self._how_lost(set(silent))
        return RankFailedError(f"rank {self.rank}: lost in {self.spot()}: {name_of(silent)} {how} ({error})")

    @property
    def gone(self) -> dict[int, str]:
        """The ranks that take part no more, and why."""
        destroyed = {rank: has_destroyed(error) for rank, error in self._destroyed.items()}
        return destroyed | dict.fromkeys(self._left, HAS_ENDED)

    def _how_lost(self, ranks: set[int]) -> str:
        if ranks <= self._left:
            return "ended before the others were done; give all ranks the same number of batches, or use join()"
        if ranks <= self.gone.keys():
            reason = next(filter(None, map(self._destroyed.get, sorted(ranks))), "")
            if reason:
                return f"destroyed the process group after {reason}"
            return (
                "destroyed the process group before the others were done: if it has failed, the cause is in its "
                "output; else give all ranks the same number of batches, or use join()"
            )
        return "does not answer any more: it was killed or has crashed; the cause is in its output"

    def _lost_with_the_store(self, error: BaseException) -> GradsyncError | None:
        if self.rank == 0 or is_served_by_launcher():
            return None  # the error says more
        return RankFailedError(
            f"rank {self.rank}: lost in {self.spot()}: rank 0 does not answer any more, and the store that it serves "
            f"is gone: it was killed or has crashed; the cause is in its output ({error})"
        )

    def _read(self) -> None:
        """Take in what is new in the ledger."""
        for number, event in self._ledger.new_events():
            self._take(number, event)

    def _take(self, number: int, event: Event) -> None:
        concerns_me = not event.members or self.rank in event.members
        if event.kind == "left":
            self._left.add(event.rank)
            if event.text:
                self._ledger.note(number)
                self.is_deaf = True
        elif event.kind == "destroyed":
            self._destroyed[event.rank] = event.text
        elif event.kind == "inquiry" and concerns_me:
            self._ledger.answer(number, self.where())
        elif event.kind == "verdict" and concerns_me and self.error is None:
            self.error = StalledError(f"rank {self.rank}: {event.text}")
        elif event.kind == "failure" and event.rank != self.rank:
            if self.error is None:
                self.error = RankFailedError(
                    f"rank {event.rank} failed in {event.spot}: {event.text} "
                    f"[seen by rank {self.rank} in {self.spot()}]"
                )
            self._unspoken[number] = time.monotonic()

    def _ask(self, members: Sequence[int], limit_s: float) -> dict[int, Place]:
        """Return the places of the ranks that answer in time; a limit below a moment is none."""
        awaited = [rank for rank in members if rank not in self.gone]
        number = self._ledger.post(Event("inquiry", self.rank, members=tuple(members)))
        until = time.monotonic() + max(_ANSWER_S, limit_s)
        places: dict[int, Place] = {}
        while len(places) < len(awaited) and time.monotonic() < until and self.error is None:
            self._read()
            places = self._ledger.answers(number, awaited)
            time.sleep(HURRY_S)
        return places

    @contextmanager
    def _hurry(self) -> Iterator[None]:
        self._hurries += 1
        try:
            yield
        finally:
            self._hurries -= 1

    @staticmethod
    def _poll(limit_s: float, holds: Callable[[], bool]) -> bool:
        until = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > until:
                return False
            time.sleep(HURRY_S / 2)
        return True
