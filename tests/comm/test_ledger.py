"""The ledger: every rank reads the same events in the same order, whoever writes at the same time."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradsync.comm.ledger import Event, Ledger, Place, can_hold_ledger
from gradsync.comm.store import serve_store

_torch: Any = dist


@pytest.fixture(params=["tcp", "file"])
def ledgers(request: pytest.FixtureRequest, tmp_path: Path) -> list[Ledger]:
    store = (
        serve_store("127.0.0.1", 0, 3, timedelta(seconds=5))
        if request.param == "tcp"
        else _torch.FileStore(str(tmp_path / "store"), 3)
    )
    return [Ledger(_torch.PrefixStore("default", store), rank, 3) for rank in range(3)]


def test_all_ranks_read_the_same_events_in_the_same_order(ledgers: list[Ledger]) -> None:
    def write(ledger: Ledger) -> None:
        for number in range(20):
            ledger.post(Event("left", ledger.rank, str(number)))

    threads = [threading.Thread(target=write, args=(ledger,)) for ledger in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = [ledger.new_events() for ledger in ledgers]
    assert len(read[0]) == 60
    assert read[0] == read[1] == read[2]
    for rank in range(3):
        assert [event.text for _, event in read[0] if event.rank == rank] == [str(n) for n in range(20)]
    assert ledgers[0].new_events() == []


def test_answers_come_back_whole(ledgers: list[Ledger]) -> None:
    number = ledgers[0].post(Event("inquiry", 0, members=(0, 2)))
    place = Place(7, "backward", 3, 1.5, "", ("a.py:1 in f: x", "b.py:2 in g: y"))
    ledgers[2].answer(number, place)
    assert ledgers[0].answers(number, [0, 2]) == {2: place}
    assert not ledgers[0].have_noted(number, [1, 2])
    for rank in (1, 2):
        ledgers[rank].note(number)
    assert ledgers[0].have_noted(number, [1, 2])


def test_only_stores_that_processes_share_hold_a_ledger() -> None:
    assert not can_hold_ledger(_torch.PrefixStore("x", _torch.HashStore()))
