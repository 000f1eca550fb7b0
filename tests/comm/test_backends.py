"""Which backend is chosen, from what is known of the machine and of the ranks' hosts."""

import pytest
import torch
import torch.distributed as dist

from gradsync.comm import backends, shm
from gradsync.comm.backends import are_on_one_host, choose_backend
from gradsync.errors import ConfigError

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the choice is made for CPU ranks")


@no_gpu
def test_cpu_ranks_on_one_host_get_shared_memory(monkeypatch):
    monkeypatch.setattr(shm, "is_available", lambda: None)
    assert choose_backend("auto", on_one_host=True).name == "shm"
    assert choose_backend("auto", on_one_host=False).name == "gloo"


@no_gpu
def test_without_shared_memory_the_choice_is_gloo_and_says_why(monkeypatch):
    monkeypatch.setattr(backends.shm, "is_available", lambda: "this is darwin")
    choice = choose_backend("auto", on_one_host=True)
    assert (choice.name, "this is darwin" in choice.reason) == ("gloo", True)
    with pytest.raises(ConfigError, match="this is darwin"):
        choose_backend("shm")


@pytest.mark.parametrize("name", ["nope", "cpu:gloo,cuda:nope"])
def test_an_unknown_backend_is_refused_with_those_there_are(name):
    with pytest.raises(ConfigError, match="backend 'nope' is unknown; there are auto, shm, "):
        choose_backend(name)


def test_cpu_tensors_beside_gpus_do_not_get_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_backend("auto", device_type="cpu").name == "gloo"


@pytest.mark.parametrize(
    ("variables", "is_one"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node1"}, True),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, False),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, True),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, True),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7"}, False),
        ({}, False),
    ],
)
def test_the_environment_tells_whether_there_is_one_host(monkeypatch, variables, is_one):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert are_on_one_host(None, None) is is_one
    assert are_on_one_host("env://", None) is is_one


def test_an_address_or_a_store_tells_too():
    assert are_on_one_host("tcp://127.0.0.1:29500", None)
    assert are_on_one_host("tcp://[::1]:29500", None)
    assert not are_on_one_host("tcp://10.0.0.7:29500", None)
    assert not are_on_one_host("file:///shared/rendezvous", None)
    assert not are_on_one_host(None, dist.HashStore())
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    assert are_on_one_host(None, store)
