"""Who is where, and what failed: notes that the ranks leave each other in the store.

The ledger is a list of events that only grows: the key of event *k* is free or written once, so that every rank reads
the same events in the same order, and the first failure is the same for all. Beside it lie the answers to inquiries.
Nothing here waits for another rank or starts a thread; that is ``watch``'s part, and the words are ``diagnosis``'.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradsync.comm.store import number_of_visit

_torch: Any = dist  # for what torch's stubs leave out
_PATIENCE = timedelta(seconds=5)

STARTING = "starting the process group"
FAILED_START = "the start of the process group"
BEFORE_FIRST_PASS = "before the first pass"


@dataclass(frozen=True)
class Place:
    """Where a rank is; ``stack`` are the last lines of its main thread, the innermost last."""

    step: int
    phase: str
    bucket: int | None = None
    waited_s: float | None = None
    """How long it has been waiting for others; None if it is not."""
    excuse: str = ""
    """What this rank alone does, with the others told to be patient."""
    stack: tuple[str, ...] = ()
    loop: str = ""
    """What the training loop says of itself (``step 12, data``); empty if it says nothing."""
    collective: str = ""
    """The collective, none of the engine's, that it has been in for as long as it waits."""
    still_s: float = 0.0
    """How long it has begun nothing else and issued no operation."""
    mishap: str = ""
    """The exception that has ended a thread of its process; empty if there was none."""

    @property
    def spot(self) -> str:
        """Where it is, in the words of the loop and of the engine."""
        engine = self.phase if self.phase in (STARTING, FAILED_START) else f"pass {self.step} ({self.phase})"
        if not self.loop:
            return engine
        return self.loop if self.phase == BEFORE_FIRST_PASS else f"{self.loop}; {engine}"


@dataclass(frozen=True)
class Event:
    """Something that all ranks are to know."""

    kind: str
    """``failure`` (an exception ended the rank), ``left`` (it ended in peace), ``destroyed`` (its group),
    ``inquiry`` or ``verdict``."""
    rank: int
    text: str = ""
    spot: str = ""
    """Where the rank was when it failed."""
    members: tuple[int, ...] = ()
    """The ranks that an inquiry or a verdict is about."""


class Ledger:
    """The notes of one process group's ranks; every call may raise what the store raises when it is gone."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self._keep_alive = store
        connection = own_connection(store)
        life = number_of_visit(_torch.PrefixStore("gradsync/ledgers", connection), rank)
        self._store = _Counted(_torch.PrefixStore(f"gradsync/ledger/{life}", connection))
        self._next = 0

    @property
    def open_call(self) -> int:
        """The number of the call that the store has not answered yet; 0 if there is none. It never times out."""
        return self._store.open_call

    def post(self, event: Event) -> int:
        """Append an event, and return its number."""
        text = json.dumps(asdict(event))
        number = self._next
        while self._store.compare_set(f"event/{number}", "", text).decode() != text:
            number += 1
        return number

    def new_events(self) -> list[tuple[int, Event]]:
        """Return the events that this rank has not read yet, each with its number."""
        events = []
        while self._store.check([f"event/{self._next}"]):
            found = json.loads(self._store.get(f"event/{self._next}"))
            events.append((self._next, Event(**{**found, "members": tuple(found["members"])})))
            self._next += 1
        return events

    def answer(self, inquiry: int, place: Place) -> None:
        """Say where this rank is."""
        self._store.set(f"answer/{inquiry}/{self.rank}", json.dumps(asdict(place)))

    def note(self, event: int) -> None:
        """Say that this rank knows of an event."""
        self._store.set(f"noted/{event}/{self.rank}", "")

    def have_noted(self, event: int, ranks: Sequence[int]) -> bool:
        """Whether all these ranks know of an event."""
        return bool(self._store.check([f"noted/{event}/{rank}" for rank in ranks]))

    def answers(self, inquiry: int, ranks: Sequence[int]) -> dict[int, Place]:
        """Return what ranks have answered so far."""
        found = {}
        for rank in ranks:
            key = f"answer/{inquiry}/{rank}"
            if self._store.check([key]):
                values = json.loads(self._store.get(key))
                found[rank] = Place(**{**values, "stack": tuple(values["stack"])})
        return found


class _Counted:
    """A store that numbers its calls, so that another thread can see that one is not answered."""

    def __init__(self, store: Any) -> None:
        self.open_call = 0
        self._store = store
        self._numbers = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self.open_call = next(self._numbers)
            try:
                return method(*arguments)
            finally:
                self.open_call = 0

        return call


def own_connection(store: Any) -> Any:
    """Return the same store with a connection of its own, so that nobody's long wait on the other one is in the way."""
    bottom = store
    while isinstance(bottom, _torch.PrefixStore):
        bottom = bottom.underlying_store
    if not isinstance(bottom, _torch.TCPStore) or not hasattr(store, "clone"):
        return store  # a file store is shared as it is: its copies would count as further processes
    other = store.clone()
    other.set_timeout(_PATIENCE)
    return other


def can_hold_ledger(store: Any) -> bool:
    """Whether a store is one that several processes really share."""
    while isinstance(store, _torch.PrefixStore):
        store = store.underlying_store
    return isinstance(store, _torch.TCPStore | _torch.FileStore)
