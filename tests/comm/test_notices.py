"""Waiting for the word of all ranks: it ends when all are there, or with its limit, and says nothing meanwhile."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import gradsync
from gradsync.comm.notices import _Notices


def test_a_wait_that_reaches_its_limit_raises_without_a_warning_of_torchs_own(capfd):
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    store.set("0", "here")
    notices = _Notices(store, ["0", "1"])
    with pytest.raises(RuntimeError, match="has not come within 0.3 s"):
        notices.wait(timedelta(seconds=0.3))
    assert not notices.is_completed()
    store.set("1", "here")
    notices.wait(timedelta(seconds=0.3))
    assert notices.is_completed()
    assert capfd.readouterr().err == ""


def test_ranks_that_were_in_another_world_before_meet_those_that_were_not():
    stores = [dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False) for _ in range(2)]
    # forked from a server that has imported torch: three imports side by side take longer than all the rest
    mp.start_processes(_in_two_worlds, ([store.port for store in stores],), nprocs=3, start_method="forkserver")


def _in_two_worlds(rank: int, ports: list[int]) -> None:
    for port, world in zip(ports, (2, 3), strict=True):
        if rank < world:
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
            ddp = gradsync.DistributedDataParallel(nn.Linear(2, 1), soft_limit_s=60)
            ddp(torch.ones(1, 2)).sum().backward()
            dist.destroy_process_group()
