"""Keeps an eye on the other ranks while this one works or waits, and ends a wait that has become useless.

One thread a process reads the ledger twice a second. It answers where this rank is, even while the main thread is
stuck; it asks all ranks when this one has waited for longer than the soft limit; and when a rank has failed, or the
ranks were found to have lost each other, it leaves the error in ``error``, which every wait of this rank then raises.

[Note: Ending a wait] A wait on gloo cannot be interrupted, so it is cut into slices, between which it looks at
``error``. Groups written in Python offer ``give_up`` and are waited for in one piece. Where neither works the
group's own time-out has to do, or ``when_stuck``, which ends the process.

[Note: Other collectives] Those that torch issues (fully sharded, tensor and pipeline parallel) and the user's own wait
as torch waits; that a rank does is seen from its stack (``standstill``). Such a wait may be a part of a longer
exchange, and is held against nobody who gets on: it is only useless if a rank has begun nothing new for the soft limit,
or does not answer. With ``when_stuck``, and in torch's ``Join`` and SyncBatchNorm, that is; without it the users' own
barriers may last as they like, unless a rank has failed or is silent for another soft limit. The process is ended then
(``last_words``).

[Note: Parts of the world] Whoever waits in a group that is a part of the world (replicas of one stage of a pipeline)
asks its members first. If one of them waits in a collective of another group, the rank that keeps all of them is
perhaps none of the members, so then everybody is asked.

[Note: A store that is silent] Its calls know no time limit, and whoever serves it may be stopped, or be a host that is
gone. So a second thread looks whether the first one is still in the same call; it counts its own looks rather than the
time, since this process may have been stopped itself. Without the store nobody can be asked: a wait beyond the limit is
then ended on this rank's own judgement.

[Note: Cost] Nothing happens on a pass that goes well but a few attributes being set, and two looks a second.
"""

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch.distributed as dist

from gradsync.comm.correspondent import HURRY_S, Correspondent
from gradsync.comm.diagnosis import diagnose
from gradsync.comm.ledger import BEFORE_FIRST_PASS, Event, Ledger, Place
from gradsync.comm.other_wait import OtherWait
from gradsync.comm.remarks import in_a_line
from gradsync.comm.standstill import Standstill, is_in_collective, stack_of
from gradsync.comm.store import is_served_by_launcher
from gradsync.errors import GradsyncError, StalledError

logger = logging.getLogger("gradsync")

_LOOK_S = 0.5
_SILENT_S = 1.0  # how long one of the others may take for that, which may be at something that lasts
_AFTER_LEAVING_S = 1.0
_STUCK_S = 3.0
_PARTING_S = 5.0  # how long a clean-up may take in which an exception is on its way
_LAST_WORDS_S = 1.0  # and how long it takes from there to the end of the process
_SILENCE_S = 5.0
_EXCUSED_LIMITS = 10  # so many soft limits is what one rank may take for what the others know to be long


_last_resort: Callable[[GradsyncError], None] | None = None


class Wait(Protocol):
    """What a rank waits in; all times are ``time.monotonic``."""

    since_s: float
    patient_until_s: float
    """Until when the others may take their time, by what they have answered."""
    limit_s: float
    members: list[int]
    thread: int | None
    """The thread of this process for whose end this rank waits, if it is that."""
    is_strict: bool
    """Whether it may not last beyond the limit for want of another rank; see [Note: Other collectives]."""
    answer_limits: float
    """How many soft limits the others may take to answer, though at least a moment."""

    def patience_with(self, places: Mapping[int, Place]) -> float:
        """Return how long to wait before asking again, by where the others are."""

    def interrupt(self, error: GradsyncError) -> None:
        """End it, if there is a way."""


class Watch(Correspondent):
    """The watch of this process over the ranks of the default group."""

    def __init__(self, ledger: Ledger, soft_limit_s: float) -> None:
        super().__init__(ledger)
        self.soft_limit_s = soft_limit_s
        self.step = 0
        self.phase = BEFORE_FIRST_PASS
        self.loop = ""
        """What the training loop says of itself."""
        self.bucket: int | None = None
        self.waiting: Wait | None = None
        self.when_stuck: Callable[[GradsyncError], None] | None = None
        """Called, on the watch's thread, when an error is known and the rank has not raised it after a while, whatever
        it does. Whoever sets it has torch's own collectives minded more strictly; see [Note: Other collectives]."""
        self.mishap = ""
        """The exception that has ended a thread of this process, which may be one that others wait for."""
        self._excuse = ""
        self._excused_since_s = 0.0
        group = default_group()
        self._group = None if group is None else weakref.ref(group)
        self._waiter = threading.main_thread().ident
        self._standstill = Standstill(self._waiter)
        self._other_wait: OtherWait | None = None
        self._is_over = threading.Event()
        self._known_since_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="gradsync-watch", daemon=True)
        self._guard = threading.Thread(target=self._run_guard, name="gradsync-guard", daemon=True)

    def start(self) -> None:
        """Begin to read the ledger."""
        self._thread.start()
        self._guard.start()

    def adopt(self, group: Any) -> None:
        """Watch over this group, which was being made until now."""
        self._group = weakref.ref(group)
        self.phase = BEFORE_FIRST_PASS

    def stop(self, patience_s: float = 0.0) -> bool:
        """End the thread; returns whether it has ended in time, which it does unless the store is stuck.

        A thread that is in the store's C++ code when the interpreter shuts down takes the process with it.
        """
        self._is_over.set()
        if self._thread.is_alive() and patience_s:
            self._thread.join(patience_s)
        return not self._thread.is_alive()

    @contextmanager
    def excused(self, what: str) -> Iterator[None]:
        """Ask the other ranks to be patient while this rank alone does something long, though not for ever."""
        self._excuse, self._excused_since_s = what, time.monotonic()
        try:
            yield
        finally:
            self._excuse = ""

    def where(self) -> Place:
        """Return where this rank is now."""
        waiting, still, now = self.waiting, self._standstill, time.monotonic()
        self._look_at_oneself()
        collective = still.collective if waiting is None else ""
        since_s = waiting.since_s if waiting is not None else still.since_s if collective else None
        worker = self._waiter if waiting is None or waiting.thread is None else waiting.thread
        # who waits for his own thread is where that one is; and whoever waits for others has no excuse
        is_waiting = since_s is not None and (worker == self._waiter or is_in_collective(worker))
        is_excusable = now - self._excused_since_s < _EXCUSED_LIMITS * self.soft_limit_s
        excuse = (self._excuse if is_excusable else "") or ("compiling" if still.is_compiling else "")
        return Place(
            self.step,
            self.phase,
            self.bucket,
            waited_s=now - since_s if since_s is not None and is_waiting else None,
            excuse="" if is_waiting else excuse,
            stack=stack_of(worker),
            loop=self.loop,
            collective=collective,
            still_s=now - still.progressed_s,
            mishap=self.mishap,
        )

    def spot(self) -> str:
        """Return the same in a few words."""
        return Place(self.step, self.phase, loop=self.loop).spot

    # -- on the thread

    def _run(self) -> None:
        while not self._is_over.wait(HURRY_S if self._hurries else self._interval_s()) and not self._is_group_gone():
            try:
                self._look()
            except Exception as loss:  # noqa: BLE001 - the store is gone; the ranks go on without
                self._loss, self.is_deaf = loss, True
            if self.is_deaf:
                return
        if self._is_group_gone():
            with suppress(Exception):  # the store may be gone, and with it all who could hear of it
                self._ledger.post(Event("destroyed", self.rank, self._error_on_its_way()))
            self._stay_for_last_words()

    def _error_on_its_way(self) -> str:
        active = sys._current_exceptions().get(self._waiter or 0)
        error = active[1] if isinstance(active, tuple) else active  # of Python 3.11, and later
        if error is None or (isinstance(error, SystemExit) and not error.code):
            return ""
        return in_a_line(error)

    def _stay_for_last_words(self) -> None:
        """Keep the store while an exception on its way destroys the group (``finally``); its text is to be heard yet.

        No longer: the next group may meet at the same place, where the old one's notes must not be found.
        """
        until_s, is_failing = time.monotonic() + _PARTING_S, False
        while self._waiter in sys._current_exceptions() and time.monotonic() < until_s:
            if self._is_over.wait(HURRY_S):
                return
            is_failing = True
        if is_failing:
            self._is_over.wait(_LAST_WORDS_S)

    @property
    def is_parting(self) -> bool:
        """Whether the group was destroyed, but what this rank says can still be heard."""
        return self._thread.is_alive() and self._is_group_gone()

    def _is_group_gone(self) -> bool:
        """Whether the user has destroyed the group that this is the watch of."""
        return self._group is not None and self._group() is not default_group()

    def _run_guard(self) -> None:
        """See [Note: A store that is silent]."""
        call, looks = 0, 0
        while not self._is_over.wait(_LOOK_S):
            looks = looks + 1 if 0 != call == self._ledger.open_call else 0
            call = self._ledger.open_call
            if self._loss is not None and not self._is_group_gone():
                self._look_alone(str(self._loss))
            elif looks * _LOOK_S >= _SILENCE_S:
                self._look_alone(f"not for {looks * _LOOK_S:.0f} s")
            elif not self._thread.is_alive():
                return

    def _interval_s(self) -> float:
        waiting = self.waiting
        limit_s = self.soft_limit_s if waiting is None else waiting.limit_s
        return min(_LOOK_S, limit_s / 8) if limit_s > 0 else _LOOK_S

    def _look(self) -> None:
        self._read()
        self._look_at_oneself()
        self._look_after_error()
        if any(time.monotonic() - heard_s > _SILENT_S for heard_s in list(self._unspoken.values())):
            self._speak_for_the_stuck()
            self.acknowledge()
        waiting = self._wait_of_now()
        if waiting is None:
            return
        now = time.monotonic()
        if self.error is not None:
            waiting.interrupt(self.error)
        elif 0 < self._limit_of(waiting) < now - waiting.since_s and now >= waiting.patient_until_s:
            self._inquire(waiting)

    def _look_alone(self, loss: str) -> None:
        """Nobody can be asked any more: what has lasted for longer than the limit is taken to be useless."""
        self._look_at_oneself()
        self._look_after_error()
        waiting = self._wait_of_now()
        if waiting is None:
            return
        waited_s = time.monotonic() - waiting.since_s
        if self.error is None and waiting.is_strict and 0 < self._limit_of(waiting) < waited_s:
            whose = "the launcher serves it" if is_served_by_launcher() else "rank 0 serves it"
            self.error = StalledError(
                f"rank {self.rank}: has waited {waited_s:.1f} s for other ranks in {self.spot()}, and the soft limit "
                f"is {waiting.limit_s:g} s; they cannot be asked where they are, since the store does not answer "
                f"({loss}): {whose}, so look whether that was killed, is stopped, or cannot be reached"
            )
        if self.error is not None:
            waiting.interrupt(self.error)

    def _look_at_oneself(self) -> None:
        self._standstill.look((self.loop, self.step, self.phase))

    def _wait_of_now(self) -> "Wait | None":
        """Return what this rank waits in: the engine's wait, or see [Note: Other collectives]."""
        if self.waiting is not None:
            return self.waiting
        if not self._standstill.collective or (self.when_stuck is None and _last_resort is None):
            return None
        since_s = self._standstill.since_s
        is_strict = self.when_stuck is not None or self._standstill.is_of_training
        if self._other_wait is None or self._other_wait.since_s != since_s:
            self._other_wait = OtherWait(since_s, self.soft_limit_s, is_strict)
        everyone, here = range(self.world), [rank for rank in range(self.world) if rank not in self.gone]
        # a user's group may do without those that have ended in peace, though not with one rank alone
        self._other_wait.members = list(everyone if self.when_stuck is not None or len(here) == 1 else here)
        return self._other_wait

    def _look_after_error(self) -> None:
        """A main thread that is stuck where nobody can interrupt it (in the store, say) does not hear of an error."""
        now = time.monotonic()
        if self.error is None or self.has_raised:
            self._known_since_s = now
        elif now - self._known_since_s > _STUCK_S:
            if self.when_stuck is not None:
                self.when_stuck(self.error)
            elif _last_resort is not None and self._is_stuck_for(_STUCK_S):
                _last_resort(self.error)

    def _speak_for_the_stuck(self) -> None:
        """A launcher may end this rank while it stands in a collective, and it would have said nothing."""
        is_in_torchs = self.waiting is None and bool(self._standstill.collective)
        if self.error is not None and not self.has_raised and is_in_torchs and self.when_stuck is None:
            logger.error("gradsync: %s: %s", type(self.error).__name__, self.error)

    def _is_stuck_for(self, seconds: float) -> bool:
        """Whether the main thread has waited for others that long: whatever else it does may come to an end."""
        waiting = self._wait_of_now()
        return waiting is not None and time.monotonic() - waiting.since_s > seconds

    def _limit_of(self, waiting: "Wait") -> float:
        """Who has ended will not come any more, however long one waits."""
        has_hope = self.gone.keys().isdisjoint(waiting.members)
        return waiting.limit_s if has_hope else min(waiting.limit_s or _AFTER_LEAVING_S, _AFTER_LEAVING_S)

    def _inquire(self, waiting: "Wait") -> None:
        """Ask where all are; the first one to have asked says to all what was found. See [Note: Parts of the world]."""
        since_s = waiting.since_s
        members: Sequence[int] = waiting.members
        places = self._ask(members, waiting.limit_s * waiting.answer_limits)
        is_engines = waiting is self.waiting  # the world's ranks that a program's own wait leaves out have ended
        is_part = is_engines and len(places) == len(members) < self.world
        if is_part and any(place.collective for place in places.values()):
            members = range(self.world)
            places = self._ask(members, waiting.limit_s * waiting.answer_limits)
        self._look_at_oneself()
        if self._wait_of_now() is not waiting or waiting.since_s != since_s or self.error is not None:
            return  # it has got on meanwhile, or somebody else was quicker
        if len(places) == len(members):
            patience_s = self._patience_with(places, waiting)
            if patience_s > 0:
                waiting.patient_until_s = time.monotonic() + patience_s
                return
        is_wider = len(members) > len(waiting.members)
        text = diagnose(members, places, self.gone, waiting.limit_s, self.rank, is_wider)
        self._ledger.post(Event("verdict", self.rank, text, members=tuple(members)))
        self._read()

    @staticmethod
    def _patience_with(places: Mapping[int, Place], waiting: "Wait") -> float:
        """Return how long to wait before asking again, since the others have reason to take their time."""
        if any(place.excuse for place in places.values()):
            return waiting.limit_s
        return waiting.patience_with(places)


def set_last_resort(end: Callable[[GradsyncError], None]) -> None:
    """Say how a process is ended that cannot raise an error, since it is stuck in a wait of torch's own."""
    global _last_resort
    _last_resort = end


def default_group() -> Any:
    """Return the default group; None if there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
