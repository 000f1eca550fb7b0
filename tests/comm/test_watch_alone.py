"""What a rank does when the store, and with it all word of the others, is silent or lost; how long an excuse holds."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist
from endless_wait import EndlessWait

from gradsync.comm import watch as watch_module
from gradsync.comm.ledger import Ledger, _Counted
from gradsync.comm.watch import Watch
from gradsync.errors import RankFailedError, StalledError

PATIENCE_S = 60.0


@dataclass
class Store:
    """A store whose ``check`` answers, breaks, or is silent."""

    mood: str = "answers"
    has_woken: threading.Event = field(default_factory=threading.Event)

    def check(self, keys: list[str]) -> bool:
        if self.mood == "breaks":
            raise RuntimeError("connection reset by peer")
        if self.mood == "is silent":
            self.has_woken.wait(PATIENCE_S)
        return False


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(watch_module, "_LOOK_S", 0.02)
    monkeypatch.setattr(watch_module, "_SILENCE_S", 0.1)
    return Store()


@pytest.fixture
def watch(store: Store) -> Iterator[Watch]:
    ledger = Ledger(dist.HashStore(), 1, 2)  # type: ignore[attr-defined]
    ledger._store = _Counted(store)
    made = Watch(ledger, 0.2)
    yield made
    made.stop()
    store.has_woken.set()


def until(holds: Any) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize("mood", ["breaks", "is silent"])
def test_a_wait_beyond_the_limit_ends_without_the_store(watch: Watch, store: Store, mood: str) -> None:
    store.mood = mood
    wait = EndlessWait()
    watch.waiting = wait  # type: ignore[assignment]
    watch.start()
    until(lambda: wait.interrupted)
    assert isinstance(watch.error, StalledError)
    assert "the store does not answer" in str(watch.error) and "rank 0 serves it" in str(watch.error)


@pytest.mark.parametrize("mood", ["breaks", "is silent"])
@pytest.mark.parametrize(("limit_s", "is_strict"), [(1e9, True), (0.2, False)])
def test_a_wait_within_the_limit_or_of_the_users_own_goes_on_without_the_store(
    watch: Watch, store: Store, mood: str, limit_s: float, is_strict: bool
) -> None:
    store.mood = mood
    wait = EndlessWait(limit_s=limit_s, is_strict=is_strict)
    watch.waiting = wait  # type: ignore[assignment]
    watch.start()
    until(lambda: watch._loss is not None if mood == "breaks" else watch._ledger.open_call)
    watch._look_alone("as found")
    assert watch.error is None and not wait.interrupted


def test_a_store_that_answers_again_is_asked_again(watch: Watch, store: Store) -> None:
    store.mood = "is silent"
    watch.start()
    until(lambda: watch._ledger.open_call)
    store.mood = "answers"
    store.has_woken.set()
    until(lambda: watch._ledger.open_call == 0)
    assert not watch.is_deaf and watch.error is None


def test_a_connection_lost_together_with_the_store_is_rank_0s_end(watch: Watch, store: Store) -> None:
    store.mood = "breaks"
    watch.start()
    until(lambda: watch.is_deaf)
    lost = RuntimeError("connection closed by peer")
    assert watch.explain(lost, ()) is lost
    explained = watch.explain(lost, (0, 1))
    assert isinstance(explained, RankFailedError)
    assert "rank 0 does not answer any more, and the store that it serves is gone" in str(explained)


def test_an_excuse_ends_after_some_limits(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    with watch.excused("writing a checkpoint"):
        assert watch.where().excuse == "writing a checkpoint"
        monkeypatch.setattr(time, "monotonic", lambda: now + 100 * watch.soft_limit_s)
        assert watch.where().excuse == ""
    assert watch.where().excuse == ""
