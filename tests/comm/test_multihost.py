"""The shm backend over two hosts: two network namespaces of this machine, joined by a virtual cable."""

import functools
import operator
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.comm import shm
from gradsync.comm.multihost import MultiHostGroup
from gradsync.errors import BackendError, GradsyncError, StalledError

# The host of each rank: the ranks of a host are not neighbours, and the hosts are not equal.
HOSTS = {"operations": [0, 1, 1, 0, 1], "death": [0, 1, 0], "late": [0, 1, 0], "given_up": [0, 1, 0]}
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def namespaces() -> Iterator[list[str]]:
    """The names of two network namespaces in which interface ``cable`` reaches the other."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command (iproute2)")
    mark = uuid.uuid4().hex[:8]
    names = [f"gradsync-{mark}-{host}" for host in range(2)]
    try:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
                pytest.skip("this system does not allow network namespaces")
        _ip(
            "link",
            "add",
            "cable",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            names[1],
        )
        for host, name in enumerate(names):
            _ip("-n", name, "address", "add", f"10.213.7.{host + 1}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def run(namespaces: list[str], folder: Path, scenario: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a scenario of this file on every rank, each on its host."""
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "cable",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    processes = []
    for rank, host in enumerate(HOSTS[scenario]):
        command = ["ip", "netns", "exec", namespaces[host], sys.executable, "-W", "error", __file__]
        command += [scenario, str(rank), str(folder / "store")]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    results = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=PATIENCE_S)
            results.append(subprocess.CompletedProcess(process.args, process.returncode, output))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


def test_operations_over_two_hosts(namespaces: list[str], tmp_path: Path) -> None:
    for rank, result in enumerate(run(namespaces, tmp_path, "operations")):
        assert result.returncode == 0, f"rank {rank}:\n{result.stdout}"


def test_a_death_is_told_to_both_hosts(namespaces: list[str], tmp_path: Path) -> None:
    results = run(namespaces, tmp_path, "death")
    for rank, result in enumerate(results):
        if rank == 2:
            assert result.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
        else:
            assert result.returncode == 0, f"rank {rank}:\n{result.stdout}"
            assert "rank 2 died" in result.stdout


def test_a_late_host_is_named(namespaces: list[str], tmp_path: Path) -> None:
    results = run(namespaces, tmp_path, "late")
    for rank, result in enumerate(results):
        assert result.returncode == 0, f"rank {rank}:\n{result.stdout}"
    assert "on other hosts (1)" in results[0].stdout


def test_a_wait_for_another_host_can_be_given_up(namespaces: list[str], tmp_path: Path) -> None:
    for rank, result in enumerate(run(namespaces, tmp_path, "given_up")):
        assert result.returncode == 0, f"rank {rank}:\n{result.stdout}"


# -- the ranks' side


def operations(rank: int, world: int) -> None:
    group: Any = dist.group.WORLD
    assert isinstance(group, MultiHostGroup) and dist.get_backend() == "shm"

    def numbers(peer: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, 3, (size,), generator=torch.Generator().manual_seed(peer)).to(dtype)

    for size in (1, 1000, 300_000):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            parts = [numbers(peer, size, dtype) for peer in range(world)]
            for tensor in (parts[rank].clone(), group.allocate(size, dtype).copy_(parts[rank])):
                dist.all_reduce(tensor)
                assert torch.equal(tensor, functools.reduce(operator.add, parts))
            for root in range(world):
                tensor = parts[rank].clone()
                dist.broadcast(tensor, root)
                assert torch.equal(tensor, parts[root])
            outputs = [torch.empty_like(parts[0]) for _ in range(world)]
            dist.all_gather(outputs, parts[rank])
            assert all(torch.equal(*pair) for pair in zip(outputs, parts, strict=True))
            output = torch.empty_like(parts[0])
            dist.reduce_scatter(output, [parts[rank] * peer for peer in range(world)])
            assert torch.equal(output, functools.reduce(operator.add, parts) * rank)
        floats = [numbers(peer, size, torch.float32) for peer in range(world)]
        tensor = floats[rank].clone()
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert torch.equal(tensor, sum(floats) / world)
        tensor = floats[rank].clone()
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        assert torch.equal(tensor, torch.stack(floats).amax(0))
        work = dist.reduce(floats[rank].clone(), 3, async_op=True)
        work.wait()
        gathered = [torch.empty(size) for _ in range(world)]
        dist.gather(floats[rank], gathered if rank == 1 else None, 1)
        assert rank != 1 or all(torch.equal(*pair) for pair in zip(gathered, floats, strict=True))
        dist.scatter(tensor, floats if rank == 4 else None, 4)
        assert torch.equal(tensor, floats[rank])
        exchanged = [torch.empty(size) for _ in range(world)]
        dist.all_to_all(exchanged, [floats[rank] + peer for peer in range(world)])
        assert all(torch.equal(exchanged[peer], floats[peer] + rank) for peer in range(world))
        if rank == 0:
            dist.send(floats[0], 3)
        elif rank == 3:
            assert dist.recv(tensor) == 0
            assert torch.equal(tensor, floats[0])
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, ("rank", rank))
    assert objects == [("rank", peer) for peer in range(world)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.full((2, 3), float(rank))).sum().backward()
    assert torch.allclose(model.module.weight.grad, torch.full((1, 3), 2.0 * sum(range(world)) / world))
    local = dist.new_group([0, 3])  # of one host
    if rank in (0, 3):
        assert isinstance(local, shm.ShmGroup)
    dist.barrier()
    dist.destroy_process_group()


def death(rank: int, world: int) -> None:
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(100_000))
    except BackendError as error:
        print(error)
    else:
        raise AssertionError("no error")


def late(rank: int, world: int) -> None:
    dist.barrier()
    group: Any = dist.group.WORLD
    if rank == 1:
        time.sleep(6.0)
        return
    group.set_timeout(timedelta(seconds=2))
    try:
        dist.all_reduce(torch.ones(10))
    except BackendError as error:
        print(error)
    else:
        raise AssertionError("no error")


def given_up(rank: int, world: int) -> None:
    """Rank 0 waits on the network, and rank 2 for rank 0; the watch of each gives the group up."""
    dist.barrier()
    group: Any = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["done/0", "done/2"])
        return
    threading.Timer(1.0, group.give_up, [StalledError("the odd one out is rank 1")]).start()
    try:
        dist.all_reduce(torch.ones(10))
    except GradsyncError as error:  # this rank's own, or what its peer on this host has told of that
        assert "the odd one out is rank 1" in str(error)
    else:
        raise AssertionError("no error")
    store.set(f"done/{rank}", "")
    os._exit(0)  # gloo's shutdown would wait for the work that was given up


def main() -> None:
    scenario, rank, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    shm.register()
    world = len(HOSTS[scenario])
    store = dist.FileStore(path, world)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=90)
    dist.init_process_group("shm", store=store, rank=rank, world_size=world, timeout=timeout)
    {"operations": operations, "death": death, "late": late, "given_up": given_up}[scenario](rank, world)


if __name__ == "__main__":
    main()
