"""The store listens where it was told to and nowhere else."""

import os
import sys
from datetime import timedelta

import pytest

from gradsync.comm.store import open_store, resolve, serve_store
from listening import addresses, free_port, own_addresses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables of sockets")

LIMIT = timedelta(seconds=60)


@pytest.mark.parametrize("address", own_addresses())
def test_it_listens_on_the_chosen_address_alone(address: str) -> None:
    before = addresses([os.getpid()])
    store = serve_store(address, 0, 2, LIMIT)
    assert addresses([os.getpid()]) - before == {(address, store.port)}
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("address", own_addresses())
def test_rank_0_listens_where_master_addr_says(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    before = addresses([os.getpid()])
    store = open_store(address, port, 0, 2, LIMIT)
    assert addresses([os.getpid()]) - before == {(address, port)}
    other = open_store(address, port, 1, 2, LIMIT)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_names_become_addresses_the_same_way_everywhere() -> None:
    assert resolve("localhost") == "127.0.0.1"
    assert resolve("no-such-host.invalid") == "no-such-host.invalid"
