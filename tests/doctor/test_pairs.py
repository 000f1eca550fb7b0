"""The way between ranks, with ranks that are threads of this process."""

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from gradsync.doctor import pairs
from gradsync.doctor.pairs import Card, Prober, Way, pairs_to_measure
from gradsync.doctor.ranks import _exchange, judge_ways, told_ways
from gradsync.errors import BackendError
from listening import addresses, own_addresses


def probe(store: dist.Store, rank: int, world: int, error: str = "") -> tuple[list[Card], list[Way]]:
    prober = Prober(store, rank, world, "127.0.0.1", 10.0, error)
    try:
        prober.meet()
        return prober.cards, prober.measure()
    finally:
        prober.close()


def test_every_pair_is_measured_and_every_rank_learns_it() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        told = [each.result() for each in [pool.submit(probe, store, rank, 3) for rank in range(3)]]
    cards, ways = told[0]
    assert [(way.first, way.second) for way in ways] == [(0, 1), (0, 2), (1, 2)]
    assert all(each == told[0] for each in told)
    for way in ways:
        assert way.error == ""
        assert way.latency_s > 0 and way.there_bytes_per_s > 0 and way.back_bytes_per_s > 0
        assert abs(way.clock_offset_s) < 1.0
    assert len(told_ways(cards, ways)) == 4


def test_the_ranks_that_stop_coming_are_named() -> None:
    store, limit = dist.HashStore(), timedelta(seconds=0.1)
    with pytest.raises(BackendError, match="nothing was heard of rank 1, 2 within 0.1 s"):
        _exchange(store, "host", 0, 3, [], limit)
    prober = Prober(store, 0, 3, "127.0.0.1", 0.1)
    with pytest.raises(BackendError, match="nothing was heard of rank 1, 2"):
        prober.meet()
    prober.close()


def test_the_rank_that_does_not_measure_its_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_SENDING_S", 0.0)
    prober = Prober(dist.HashStore(), 2, 3, "127.0.0.1", 0.05)
    prober.cards = [Card(rank, f"host-{rank}", "127.0.0.1", 1, "") for rank in range(3)]
    with pytest.raises(BackendError, match="nothing was heard of rank 0 "):
        prober.measure()
    prober.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables of sockets")
@pytest.mark.parametrize("address", own_addresses())
def test_it_listens_at_the_advertised_address_alone_and_not_for_longer_than_needed(address: str) -> None:
    before = addresses([os.getpid()])
    prober = Prober(dist.HashStore(), 0, 1, address, 2.0)
    prober.meet()
    assert addresses([os.getpid()]) - before == {(address, prober.cards[0].port)}
    prober.close()
    assert addresses([os.getpid()]) - before == set()


def test_a_rank_that_cannot_listen_is_told_and_the_others_are_measured() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        told = [pool.submit(probe, store, rank, 3, "it is broken" if rank == 1 else "") for rank in range(3)]
        cards, ways = told[0].result()
    assert [way.error for way in ways] == ["it is broken", "", "it is broken"]
    assert not any(finding.level.value == "problem" for finding in judge_ways(cards, ways))  # the rank says so itself


def test_a_way_that_is_closed_is_a_problem_with_both_ends_named() -> None:
    store = dist.HashStore()
    first, second = (Prober(store, rank, 2, "127.0.0.1", 2.0) for rank in range(2))
    for prober in (first, second):
        prober.meet()
    second.close()
    first.close()
    way = first._measure_from_here(1)
    assert "rank 0" in way.error and "does not reach rank 1" in way.error and socket.gethostname() in way.error
    (finding,) = judge_ways(first.cards, [way])
    assert finding.level.value == "problem" and "firewall" in finding.remedy


def test_slow_ways_and_clocks_are_noted() -> None:
    cards = [Card(rank, f"node{rank}", "10.0.0.1", 1, "") for rank in range(2)]
    way = Way(0, 1, latency_s=0.02, there_bytes_per_s=1e6, back_bytes_per_s=2e6, clock_offset_s=-7.0)
    found = {(finding.level.value, finding.topic): finding.text for finding in judge_ways(cards, [way])}
    assert "slow between ranks 0-1" in found["note", "ways"]
    assert found["note", "clocks"] == "the clocks of node0 and node1 are -7.0 s apart"


@pytest.mark.parametrize("num_hosts", [2, 8, 40])
def test_of_very_many_ranks_hosts_and_neighbours_are_measured(num_hosts: int) -> None:
    hosts = [f"node{rank // 8}" for rank in range(8 * num_hosts)]
    pairs = pairs_to_measure(hosts)
    assert len(pairs) <= 66 + len(hosts)
    assert {(rank, rank + 1) for rank in range(len(hosts) - 1)} <= set(pairs)
    assert (0, 8) in pairs
    assert pairs_to_measure(["one"] * 4) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
