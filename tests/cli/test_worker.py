"""What a rank takes of its machine."""

import pytest
import torch

from gradsync.cli import worker
from gradsync.errors import ConfigError
from gradsync.train.config import resolve


@pytest.fixture
def two_gpus(monkeypatch):
    """Two devices that nothing is computed on; returns which were chosen."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    return chosen


def test_the_device_is_that_of_the_local_rank(two_gpus, monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert worker._device(resolve({})) == torch.device("cuda", 1)
    assert two_gpus == [1, "high"], "float32 products run as TF32"


def test_more_processes_than_devices_are_refused(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="local rank 2 has no CUDA device: there are 2; start at most 2 processes"):
        worker._device(resolve({}))


def test_the_cpu_when_it_is_asked_for_or_all_there_is(two_gpus, monkeypatch):
    assert worker._device(resolve({"device": "cpu"})) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert worker._device(resolve({})) == torch.device("cpu")
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        worker._device(resolve({"device": "cuda"}))
