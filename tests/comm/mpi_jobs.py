"""Jobs for ranks that ``mpiexec`` has started, beside those of the shm backend: gradsync's engine, and failures."""

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm_jobs import assert_close, averaged, batch, make_model, new_group, shm_group, train

import gradsync
from gradsync.comm import private
from gradsync.comm.mpi_group import MpiGroup
from gradsync.comm.watches import set_soft_limit
from gradsync.errors import BackendError, StalledError


def default_group_is_mpi(rank: int, world: int) -> None:
    assert isinstance(dist.group.WORLD, MpiGroup)
    assert os.environ["LOCAL_RANK"] == str(rank) and os.environ["LOCAL_WORLD_SIZE"] == str(world)


def default_group_is_gloo(rank: int, world: int) -> None:
    assert dist.get_backend() == "gloo"
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.eq(world).all()


def gradsync_ddp(rank: int, world: int) -> None:
    with shm_group() as group:
        for arguments in ({}, {"bucket_cap_mb": 1e-4}):
            model = gradsync.DistributedDataParallel(make_model(), process_group=group, **arguments)
            assert_close(train(model, rank), averaged(world))


def gradsync_zero(rank: int, world: int) -> None:
    model = gradsync.DistributedDataParallel(make_model())
    optimizer = gradsync.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, ddp=model, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    assert_close([parameter.detach() for parameter in model.parameters()], averaged(world))


def hurried_group(ranks: list[int] | None = None, timeout_s: float = 2.0) -> Any:
    """A group whose operations have little time, unlike the meeting of its ranks."""
    group = new_group(ranks=ranks)
    if isinstance(group, MpiGroup):
        group.set_timeout(timedelta(seconds=timeout_s))
    dist.barrier()
    return group


def late(rank: int, world: int) -> None:
    group = hurried_group()
    if rank == world - 1:
        time.sleep(6.0)
        with pytest.raises(BackendError, match="another rank gave up|timed out"):
            dist.all_reduce(torch.ones(3), group=group)  # may still find what the others had sent
            dist.all_reduce(torch.ones(3), group=group)
        return
    time.sleep(0.5 * rank)
    with pytest.raises(BackendError, match=rf"all_reduce.*number 0.*nothing was heard of rank {world - 1}"):
        dist.all_reduce(torch.ones(3), group=group)
    with pytest.raises(BackendError, match="the group has failed before"):
        dist.all_reduce(torch.ones(3), group=group)


def given_up(rank: int, world: int) -> None:
    group = hurried_group(timeout_s=60.0)
    if rank == 0:
        threading.Timer(0.2, group.give_up, [StalledError("the others do not come")]).start()
        with pytest.raises(StalledError, match="^the others do not come$"):
            dist.all_reduce(torch.ones(3), group=group)


def elsewhere(rank: int, world: int) -> None:
    group = hurried_group([0, 1])
    if rank > 1:
        return
    other = "reduce" if rank == 0 else "barrier"
    with pytest.raises(BackendError, match=rf"rank {1 - rank} waits in {other}.* number 0|another rank gave up"):
        if rank == 0:
            dist.barrier(group)
        else:
            dist.reduce(torch.ones(1_000_000), 1, group=group)


def late_to_a_private_group(rank: int, world: int) -> None:
    set_soft_limit(0.5)
    if rank == world - 1:
        private._new_group = lambda *_: time.sleep(2.5)  # type: ignore[assignment,return-value,func-returns-value]
    with pytest.raises(StalledError, match=f"the odd one out is rank {world - 1}: it is busy elsewhere"):
        gradsync.DistributedDataParallel(make_model())


def message_of_a_group_that_is_given_up(rank: int, world: int) -> None:
    group = hurried_group(timeout_s=60.0)
    if rank == 0:
        work = dist.irecv(torch.ones(3), 1, group)
        group.give_up(StalledError("the others do not come"))
        with pytest.raises(StalledError, match="^the others do not come$"):
            work.wait()


def aborted(rank: int, world: int) -> None:
    group = hurried_group(timeout_s=60.0)  # which is no time that anybody waits here
    if rank == 0:
        group.abort()
        return
    with pytest.raises(BackendError, match="rank 0 has aborted the group"):
        dist.all_reduce(torch.ones(3), group=group)


def message_nobody_sends(rank: int, world: int) -> None:
    group = hurried_group()
    peer = (rank + 1) % world
    with pytest.raises(ValueError, match="tags of messages over MPI"):
        group.send([torch.ones(3)], peer, -1)
    with pytest.raises(BackendError, match=rf"receive from rank {peer} with tag 5 timed out"):
        dist.recv(torch.ones(3), peer, group, 5)


def never_joins(rank: int, world: int) -> None:
    store = dist.PrefixStore("never joins", dist.distributed_c10d._get_default_store())
    if rank == 0:
        with pytest.raises(BackendError, match="nothing was heard of rank 1 within 1 s"):
            MpiGroup(store, 0, [0, 1], timedelta(seconds=1))
    dist.barrier()


def raises(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("something is wrong here")
    dist.all_reduce(torch.ones(3))


def dies(rank: int, world: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))
