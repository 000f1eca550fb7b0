"""Watches of several ranks: who is asked and named, and how long a rank that has failed stays for the others' word.

A launcher may end the others when it sees one go.
"""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from endless_wait import EndlessWait

from gradsync.comm import correspondent
from gradsync.comm import watch as watch_module
from gradsync.comm.ledger import Ledger, Place
from gradsync.comm.store import serve_store
from gradsync.comm.watch import Watch

PATIENCE_S = 60.0

_torch: Any = dist


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Watch]]:
    monkeypatch.setattr(correspondent, "_SPOKEN_S", PATIENCE_S)
    store = serve_store("127.0.0.1", 0, 2, timedelta(seconds=PATIENCE_S))
    made = [Watch(Ledger(_torch.PrefixStore("default", store), rank, 2), 60.0) for rank in range(2)]
    for watch in made:
        watch.start()
    yield made
    for watch in made:
        watch.stop(PATIENCE_S)


def reporting(watch: Watch) -> threading.Thread:
    thread = threading.Thread(target=watch.report, args=(ValueError("no such batch"),))
    thread.start()
    return thread


def wait_for_error(watch: Watch) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while watch.error is None:
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_failed_rank_waits_for_the_word_of_the_others(watches: list[Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_SILENT_S", PATIENCE_S)
    failed = reporting(watches[1])
    wait_for_error(watches[0])
    failed.join(1.0)
    assert failed.is_alive()
    watches[0].acknowledge()
    failed.join(PATIENCE_S / 2)
    assert not failed.is_alive()


def test_a_rank_that_says_nothing_is_not_waited_for_long(watches: list[Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_SILENT_S", 0.1)
    failed = reporting(watches[1])
    failed.join(PATIENCE_S / 2)
    assert not failed.is_alive()


@pytest.mark.parametrize(
    ("where", "when_stuck", "speaks"), [("torch", None, True), ("torch", "ends", False), ("", None, False)]
)
def test_who_stands_in_a_collective_of_torchs_says_what_it_has_heard_before_it_is_ended(
    watches: list[Watch],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    when_stuck: str | None,
    speaks: bool,
) -> None:
    monkeypatch.setattr(watch_module, "_SILENT_S", 0.1)
    monkeypatch.setattr(watches[0], "_look_at_oneself", lambda: None)
    monkeypatch.setattr(watches[0], "when_stuck", when_stuck and (lambda error: None))
    watches[0]._standstill.collective = where and "all_reduce"
    reporting(watches[1]).join(PATIENCE_S / 2)
    assert ("RankFailedError: rank 1 failed in" in caplog.text) is speaks


@pytest.mark.parametrize(("other", "odd"), [("all_reduce", "rank 2: it does not answer"), ("", "rank 1: it waits in")])
def test_who_waits_in_another_group_is_not_blamed_for_a_rank_outside(
    monkeypatch: pytest.MonkeyPatch, other: str, odd: str
) -> None:
    """Rank 1 waits in a collective with rank 2, or in the engine as rank 0 does; rank 2 is stopped."""
    store = serve_store("127.0.0.1", 0, 3, timedelta(seconds=PATIENCE_S))
    made = [Watch(Ledger(_torch.PrefixStore("default", store), rank, 3), 60.0) for rank in range(2)]
    made[0].waiting = EndlessWait()  # type: ignore[assignment]
    monkeypatch.setattr(made[1], "where", lambda: Place(9, "forward", waited_s=7.0, collective=other))
    try:
        for watch in reversed(made):
            watch.start()
        wait_for_error(made[0])
    finally:
        for watch in made:
            watch.stop(PATIENCE_S)
    assert f"the odd one out is {odd}" in str(made[0].error)
