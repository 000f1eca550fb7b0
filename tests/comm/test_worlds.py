"""Ranks that make a world, leave it and make the next one, at the same address."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.comm.process import destroy_process_group
from gradsync.comm.watches import watch_of_world
from listening import beyond_loopback, free_port

PATIENCE_S = 60.0


def worlds_in_sequence(rank: int, world: int, port: int, way: str) -> list[float]:
    dist.destroy_process_group()  # the pool's
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    place = {} if way == "env://" else {"rank": rank, "world_size": world}
    found = []
    for backend, leave in (("gloo", dist.destroy_process_group), ("shm", destroy_process_group), ("gloo", leave_alone)):
        gradsync.init_process_group(backend, way, timedelta(seconds=20), soft_limit_s=5, **place)
        model = gradsync.DistributedDataParallel(nn.Linear(2, 1, bias=False))
        model(torch.full((1, 2), float(rank))).sum().backward()
        found.append(float(model.module.weight.grad[0, 0]))
        leave()
    return found


def leave_alone() -> None:
    pass


@pytest.mark.parametrize("way", ["env://", "tcp://127.0.0.1:{port}"])
def test_worlds_in_sequence(ranks: Any, way: str) -> None:
    port = free_port()
    try:
        assert ranks(worlds_in_sequence, port, way.format(port=port)) == [[0.5] * 3] * 2
    finally:
        ranks.close()


def world_after_others(rank: int, world: int, ports: list[int], way: str) -> float:
    """Two ranks have been in a world before, at another place; the third has not."""
    dist.destroy_process_group()  # the pool's
    total = torch.zeros(1)
    for port, size in zip(ports, (2, world), strict=True):
        if rank < size:
            place = way.format(port=port)
            gradsync.init_process_group("gloo", place, timedelta(seconds=40), rank=rank, world_size=size)
            total = torch.full((1,), float(rank + 1))
            dist.all_reduce(total)
            if size == 2:
                destroy_process_group()
    return float(total)


def test_ranks_that_were_in_another_world_meet_one_that_was_not(ranks3: Any) -> None:
    try:
        assert ranks3(world_after_others, [free_port(), free_port()], "tcp://127.0.0.1:{port}") == [6.0] * 3
    finally:
        ranks3.close()


def failure_after_other_worlds(rank: int, world: int, ports: list[int]) -> str:
    """The same, made by torch's own function; then the third rank fails."""
    dist.destroy_process_group()  # the pool's
    for port, size in zip(ports, (2, world), strict=True):
        if rank < size:
            dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
            watch = watch_of_world()
            assert watch is not None
            if size == 2:
                dist.barrier()
                destroy_process_group()
    if rank == world - 1:
        watch.report(ValueError("no such batch"))
        return ""
    until_s = time.monotonic() + PATIENCE_S
    while watch.error is None:
        assert time.monotonic() < until_s, "nothing was heard"
        time.sleep(0.01)
    watch.acknowledge()
    return str(watch.error)


def test_ranks_that_were_in_another_world_hear_of_the_failure_of_one_that_was_not(ranks3: Any) -> None:
    try:
        *heard, _ = ranks3(failure_after_other_worlds, [free_port(), free_port()])
    finally:
        ranks3.close()
    assert all("rank 2 failed in pass 0 (before the first pass): ValueError: no such batch" in text for text in heard)


def world_on_this_machine(rank: int, world: int, way: str) -> set[tuple[str, int]]:
    dist.destroy_process_group()  # the pool's
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # which keeps the pool on loopback
    before = beyond_loopback([os.getpid()])
    gradsync.init_process_group("gloo", way, timedelta(seconds=40), rank=rank, world_size=world)
    dist.all_reduce(torch.zeros(1))
    return beyond_loopback([os.getpid()]) - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables of sockets")
@pytest.mark.parametrize("way", ["tcp://127.0.0.1:{port}", "tcp://localhost:{port}", "file://{folder}/store"])
def test_ranks_of_one_machine_open_no_port_beyond_it(ranks: Any, way: str, tmp_path: Path) -> None:
    try:
        assert ranks(world_on_this_machine, way.format(port=free_port(), folder=tmp_path)) == [set(), set()]
    finally:
        ranks.close()
