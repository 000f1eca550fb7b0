"""The roll call: who is missing is named, with what the others have said of themselves."""

import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from gradsync.comm import roll_call
from gradsync.comm.roll_call import Card, call_roll, meet, no_connection, own_card, use_loopback_alone
from gradsync.comm.store import serve_store
from gradsync.errors import BackendError, ConfigError

_torch: Any = dist


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(roll_call, "_LAST_TO_LEAVE_S", 0.0)
    return serve_store("127.0.0.1", 0, 4, timedelta(seconds=60))


def call(store: Any, ranks: list[int], world: int, timeout_s: float) -> dict[int, Any]:
    outcome: dict[int, Any] = {}

    def one(rank: int) -> None:
        try:
            outcome[rank] = call_roll(store.clone(), rank, world, timedelta(seconds=timeout_s))
        except BackendError as error:
            outcome[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def test_everybody_learns_who_is_where(store: Any) -> None:
    outcome = call(store, [0, 1, 2], 3, 60.0)
    assert outcome[0] == outcome[1] == outcome[2] == [own_card()] * 3


def test_the_missing_are_named_and_the_present_with_their_addresses(store: Any) -> None:
    outcome = call(store, [0, 2], 4, 0.5)
    for rank in (0, 2):
        text = str(outcome[rank])
        assert f"rank {rank}: ranks 1, 3 of 4 did not come" in text
        assert f"rank 2: {own_card().address}" in text
        assert f"process {os.getpid()}" in text
        assert "WORLD_SIZE=4" in text


def test_two_processes_with_one_rank_are_told(store: Any) -> None:
    outcome = call(store, [0, 1], 2, 60.0)
    assert outcome[1] == [own_card()] * 2
    with pytest.raises(BackendError, match="rank 1: two processes claim this rank"):
        call_roll(store, 1, 2, timedelta(seconds=1))


def test_a_backend_without_connection_is_told_with_all_addresses() -> None:
    cards = [Card("one", "10.0.0.1", 11, "a"), Card("two", "127.0.1.1", 22, "b")]
    text = no_connection(RuntimeError("no route"), cards)
    assert "no route" in text and "rank 0: 10.0.0.1 (one, process 11)" in text and "rank 1: 127.0.1.1" in text


def test_ranks_of_one_machine_stay_on_loopback_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    use_loopback_alone([Card("one", "x", 1, "a"), Card("two", "x", 2, "b")])
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    use_loopback_alone([Card("one", "x", 1, "a"), Card("one", "x", 2, "a")])
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "mine"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_that_nobody_knows_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="to meet at port 0 of 127.0.0.1"):
        meet("tcp://127.0.0.1:0", None, rank, 2, timedelta(seconds=5))
