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
or does not answer. With ``when_stuck``, that is; in programs that have not set it the users' own barriers may last as
they like, unless a rank has failed or is silent for another soft limit. The process is ended then (``last_words``).

[Note: Parts of the world] Whoever waits in a group that is a part of the world (replicas of one stage of a pipeline)
asks its members first. If one of them waits in a collective of another group, the rank that keeps all of them is
perhaps none of the members, so then everybody is asked.

[Note: A store that is silent] Its calls know no time limit, and whoever serves it may be stopped, or be a host that is
gone. So a second thread looks whether the first one is still in the same call; it counts its own looks rather than the
time, since this process may have been stopped itself. Without the store nobody can be asked: a wait beyond the limit is
then ended on this rank's own judgement.

[Note: Cost] Nothing happens on a pass that goes well but a few attributes being set, and two looks a second.
"""

import atexit
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch.distributed as dist

from gradsync.comm.aftermath import is_aftermath
from gradsync.comm.diagnosis import diagnose, name_of
from gradsync.comm.ledger import BEFORE_FIRST_PASS, STARTING, Event, Ledger, Place, can_hold_ledger
from gradsync.comm.other_wait import OtherWait
from gradsync.comm.standstill import Standstill, is_in_collective, stack_of
from gradsync.comm.store import is_served_by_launcher
from gradsync.errors import GradsyncError, RankFailedError, StalledError

DEFAULT_SOFT_LIMIT_S = 60.0

_LOOK_S = 0.5
_HURRY_S = 0.05
_ANSWER_S = 1.5  # three looks of the rank that is asked
_POSTED_S = 1.0  # how long after the loss of a connection the cause may take to appear
_TOLD_S = 0.3  # the same where the other rank may well go on
_NOTED_S = 1.0
_SPOKEN_S = 2.0  # how long a failure waits for the others to have said it, too: a launcher ends them when it sees it
_SILENT_S = 1.0  # how long one of the others may take for that, which may be at something that lasts
_AFTER_LEAVING_S = 1.0
_LAST_LOOK_S = 1.0
_STORE_S = 2.0  # how much longer the store itself may take
_STUCK_S = 3.0
_SILENCE_S = 5.0
_EXCUSED_LIMITS = 10  # so many soft limits is what one rank may take for what the others know to be long


class Wait(Protocol):
    """What a rank waits in; all times are ``time.monotonic``."""

    since_s: float
    patient_until_s: float
    """Until when the others may take their time, by what they have answered."""
    limit_s: float
    members: list[int]
    thread: int | None
    """The thread of this process for whose end this rank waits, if it is that."""
    answer_limits: float
    """How many soft limits the others may take to answer, though at least a moment."""

    def patience_with(self, places: Mapping[int, Place]) -> float:
        """Return how long to wait before asking again, by where the others are."""

    def interrupt(self, error: GradsyncError) -> None:
        """End it, if there is a way."""


class Watch:
    """The watch of this process over the ranks of the default group."""

    def __init__(self, ledger: Ledger, soft_limit_s: float) -> None:
        self.rank, self.world = ledger.rank, ledger.world
        self.soft_limit_s = soft_limit_s
        self.step = 0
        self.phase = BEFORE_FIRST_PASS
        self.loop = ""
        """What the training loop says of itself."""
        self.bucket: int | None = None
        self.waiting: Wait | None = None
        self.error: GradsyncError | None = None
        self.when_stuck: Callable[[GradsyncError], None] | None = None
        """Called, on the watch's thread, when an error is known and the rank has not raised it after a while, whatever
        it does. Whoever sets it has torch's own collectives minded more strictly; see [Note: Other collectives]."""
        self.has_raised = False
        self.is_deaf = False
        """The store is gone, and with it all that the ranks could tell each other."""
        self._loss: Exception | None = None
        """How the store was lost, unless it left with its rank in peace."""
        self._excuse = ""
        self._excused_since_s = 0.0
        self._left: set[int] = set()
        self._unspoken: dict[int, float] = {}
        """The failures heard of and not yet raised by this rank, and when that was."""
        self._ledger = ledger
        group = _default_group()
        self._group = None if group is None else weakref.ref(group)
        self._waiter = threading.main_thread().ident
        self._standstill = Standstill(self._waiter)
        self._other_wait: OtherWait | None = None
        self._is_over = threading.Event()
        self._hurries = 0
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

    def report(self, error: BaseException) -> None:
        """Tell all ranks that an exception ends this one, and give them a moment to hear it and say so."""
        text = f"{type(error).__name__}: {error}"
        others = [rank for rank in range(self.world) if rank != self.rank]
        with self._hurry():
            number = self._ledger.post(Event("failure", self.rank, text, self._spot()))
            self._poll(_SPOKEN_S, lambda: self.is_deaf or self._ledger.have_noted(number, others))

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

    def _is_let_go(self, number: int) -> bool:
        """Whether all others have ended themselves or know that this rank has, whose watch has stopped."""
        for other, event in self._ledger.new_events():
            self._take(other, event)
        here = [rank for rank in range(self.world) if rank != self.rank and rank not in self._left]
        return not here or self._ledger.have_noted(number, here)

    def raised(self) -> GradsyncError:
        """Return the error for raising it: a new object, since it may be raised many times and on several threads."""
        assert self.error is not None
        self.has_raised = True
        return type(self.error)(str(self.error))

    def forget(self) -> None:
        """Forget an error, because the ranks have agreed to go on."""
        self.error, self.has_raised = None, False

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
        )

    def _spot(self) -> str:
        return Place(self.step, self.phase, loop=self.loop).spot

    def explain(self, error: BaseException, members: Sequence[int]) -> BaseException:
        """Return what stands behind an error that may only be the echo of another rank's, or the error itself.

        ``members`` are asked whether they are still there, if nobody has told of a failure.
        """
        if self.error is None and not self.is_deaf:
            with self._hurry():
                self._poll(_POSTED_S if members else _TOLD_S, lambda: self.error is not None or self.is_deaf)
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
            f"rank {self.rank} on host {socket.gethostname()}: lost in {self._spot()}: neither the "
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
        left = [rank for rank in silent if rank in self._left]
        how = (
            "ended before the others were done; give all ranks the same number of batches, or use join()"
            if left == silent
            else "does not answer any more: it was killed or has crashed; the cause is in its output"
        )
        return RankFailedError(f"rank {self.rank}: lost in {self._spot()}: {name_of(silent)} {how} ({error})")

    def _lost_with_the_store(self, error: BaseException) -> GradsyncError | None:
        if self.rank == 0 or is_served_by_launcher():
            return None  # the error says more
        return RankFailedError(
            f"rank {self.rank}: lost in {self._spot()}: rank 0 does not answer any more, and the store that it serves "
            f"is gone: it was killed or has crashed; the cause is in its output ({error})"
        )

    # -- on the thread

    def _run(self) -> None:
        while not self._is_over.wait(_HURRY_S if self._hurries else self._interval_s()):
            if self._is_group_gone():
                return
            try:
                self._look()
            except Exception as loss:  # noqa: BLE001 - the store is gone; the ranks go on without
                self._loss, self.is_deaf = loss, True
            if self.is_deaf:
                return

    def _is_group_gone(self) -> bool:
        """Whether the user has destroyed the group that this is the watch of."""
        return self._group is not None and self._group() is not _default_group()

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
        for number, event in self._ledger.new_events():
            self._take(number, event)
        self._look_at_oneself()
        self._look_after_error()
        if any(time.monotonic() - heard_s > _SILENT_S for heard_s in list(self._unspoken.values())):
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
        is_minded = waiting is self.waiting or self.when_stuck is not None
        if self.error is None and is_minded and 0 < self._limit_of(waiting) < waited_s:
            whose = "the launcher serves it" if is_served_by_launcher() else "rank 0 serves it"
            self.error = StalledError(
                f"rank {self.rank}: has waited {waited_s:.1f} s for other ranks in {self._spot()}, and the soft limit "
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
        since_s, is_strict = self._standstill.since_s, self.when_stuck is not None
        if self._other_wait is None or self._other_wait.since_s != since_s:
            self._other_wait = OtherWait(since_s, self.soft_limit_s, is_strict)
        everyone, here = range(self.world), [rank for rank in range(self.world) if rank not in self._left]
        # a user's group may do without those that have ended in peace, though not with one rank alone
        self._other_wait.members = list(everyone if is_strict or len(here) == 1 else here)
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

    def _is_stuck_for(self, seconds: float) -> bool:
        """Whether the main thread has waited for others that long: whatever else it does may come to an end."""
        waiting = self._wait_of_now()
        return waiting is not None and time.monotonic() - waiting.since_s > seconds

    def _limit_of(self, waiting: "Wait") -> float:
        """Who has ended will not come any more, however long one waits."""
        has_hope = self._left.isdisjoint(waiting.members)
        return waiting.limit_s if has_hope else min(waiting.limit_s or _AFTER_LEAVING_S, _AFTER_LEAVING_S)

    def _take(self, number: int, event: Event) -> None:
        concerns_me = not event.members or self.rank in event.members
        if event.kind == "left":
            self._left.add(event.rank)
            if event.text:
                self._ledger.note(number)
                self.is_deaf = True
        elif event.kind == "inquiry" and concerns_me:
            self._ledger.answer(number, self.where())
        elif event.kind == "verdict" and concerns_me and self.error is None:
            self.error = StalledError(f"rank {self.rank}: {event.text}")
        elif event.kind == "failure" and event.rank != self.rank:
            if self.error is None:
                self.error = RankFailedError(
                    f"rank {event.rank} failed in {event.spot}: {event.text} "
                    f"[seen by rank {self.rank} in {self._spot()}]"
                )
            self._unspoken[number] = time.monotonic()

    def _inquire(self, waiting: "Wait") -> None:
        """Ask where all are; the first one to have asked says to all what was found. See [Note: Parts of the world]."""
        since_s = waiting.since_s
        members: Sequence[int] = waiting.members
        places = self._ask(members, waiting)
        is_engines = waiting is self.waiting  # the world's ranks that a program's own wait leaves out have ended
        is_part = is_engines and len(places) == len(members) < self.world
        if is_part and any(place.collective for place in places.values()):
            members = range(self.world)
            places = self._ask(members, waiting)
        self._look_at_oneself()
        if self._wait_of_now() is not waiting or waiting.since_s != since_s or self.error is not None:
            return  # it has got on meanwhile, or somebody else was quicker
        if len(places) == len(members):
            patience_s = self._patience_with(places, waiting)
            if patience_s > 0:
                waiting.patient_until_s = time.monotonic() + patience_s
                return
        is_wider = len(members) > len(waiting.members)
        text = diagnose(members, places, sorted(self._left), waiting.limit_s, self.rank, is_wider)
        self._ledger.post(Event("verdict", self.rank, text, members=tuple(members)))
        for other, event in self._ledger.new_events():
            self._take(other, event)

    def _ask(self, members: Sequence[int], waiting: "Wait") -> dict[int, Place]:
        """Return the places of the ranks that answer in time."""
        awaited = [rank for rank in members if rank not in self._left]
        number = self._ledger.post(Event("inquiry", self.rank, members=tuple(members)))
        until = time.monotonic() + max(_ANSWER_S, waiting.limit_s * waiting.answer_limits)
        places: dict[int, Place] = {}
        while len(places) < len(awaited) and time.monotonic() < until and self.error is None:
            for other, event in self._ledger.new_events():
                self._take(other, event)
            places = self._ledger.answers(number, awaited)
            time.sleep(_HURRY_S)
        return places

    @staticmethod
    def _patience_with(places: Mapping[int, Place], waiting: "Wait") -> float:
        """Return how long to wait before asking again, since the others have reason to take their time."""
        if any(place.excuse for place in places.values()):
            return waiting.limit_s
        return waiting.patience_with(places)

    # -- small things

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
            time.sleep(_HURRY_S / 2)
        return True


def excused(what: str) -> AbstractContextManager[None]:
    """Ask the other ranks to be patient while this rank alone does something long."""
    watch = watch_of_world()
    return nullcontext() if watch is None else watch.excused(what)


def note_loop(text: str) -> None:
    """Note what this rank's training loop does from now on (``step 12, data``), for the others to read if they wait."""
    watch = watch_of_world()
    if watch is not None:
        watch.loop = text


@contextmanager
def explaining() -> Iterator[None]:
    """Have an error that only echoes another rank's raised as that one; of whatever collective, by whomever issued.

    Raises:
        RankFailedError: another rank has failed or is gone.
        StalledError: the ranks were found to have lost each other.
    """
    try:
        yield
    except Exception as error:
        watch = watch_of_world()
        if watch is None or isinstance(error, RankFailedError | StalledError) or not is_aftermath(error):
            raise
        explained = watch.explain(error, range(watch.world))
        if explained is error:
            raise
        raise explained from error


_watches: "weakref.WeakKeyDictionary[Any, Watch]" = weakref.WeakKeyDictionary()
_starting: Watch | None = None
"""The watch over ranks whose default group is being made, or could not be made."""
_last_resort: Callable[[GradsyncError], None] | None = None
_soft_limit_s = DEFAULT_SOFT_LIMIT_S


def set_soft_limit(limit_s: float) -> None:
    """Let waits of this process that name no limit of their own take this one; 0 means none."""
    global _soft_limit_s
    _soft_limit_s = limit_s
    watch = watch_of_world()
    if watch is not None:
        watch.soft_limit_s = limit_s


def set_last_resort(end: Callable[[GradsyncError], None]) -> None:
    """Say how a process is ended that cannot raise an error, since it is stuck in a wait of torch's own."""
    global _last_resort
    _last_resort = end


def watch_start(store: Any, rank: int, world: int, soft_limit_s: float) -> Watch | None:
    """Return a watch over ranks that are about to make their default group, which it watches over afterwards."""
    global _starting
    if _starting is not None:
        _starting.stop()
    _starting = None if world == 1 or not can_hold_ledger(store) else Watch(Ledger(store, rank, world), soft_limit_s)
    if _starting is not None:
        _starting.phase = STARTING
        _begin(_starting)
    return _starting


def watch_of_world() -> Watch | None:
    """Return the watch over the default group, started when first asked for; None where there is nothing to watch."""
    global _starting
    group = _default_group()
    if group is None:
        return _starting
    if group.size() == 1:
        return None
    if group not in _watches and _starting is not None and _starting.phase == STARTING:
        _watches[group], _starting = _starting, None
        _watches[group].adopt(group)
    elif group not in _watches:
        store = dist.distributed_c10d._get_default_store()
        if not can_hold_ledger(store):
            return None
        _watches[group] = Watch(Ledger(store, group.rank(), group.size()), _soft_limit_s)
        _begin(_watches[group])
    return _watches[group]


def _begin(watch: Watch) -> None:
    watch.start()
    atexit.unregister(_stop_all_at_exit)
    atexit.register(_stop_all_at_exit)


def _default_group() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _forget_in_child() -> None:
    """A forked child has neither the threads nor the say of its parent."""
    global _starting
    for watch in _all():
        watch.stop()
    _watches.clear()
    _starting = None


def _all() -> list[Watch]:
    return [*_watches.values(), *([] if _starting is None else [_starting])]


def stop_all(patience_s: float) -> bool:
    """End every watch of this process, before the interpreter shuts down; returns whether all have ended."""
    return all([watch.stop(patience_s) for watch in _all()])


def _stop_all_at_exit() -> None:
    stop_all(_LAST_LOOK_S)


os.register_at_fork(after_in_child=_forget_in_child)
