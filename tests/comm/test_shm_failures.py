"""What the shm backend does when something goes wrong: deaths, time-outs, and ranks that do not agree."""

import contextlib
import gc
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm_jobs import new_group, shm_group

from gradsync.comm.shm import ShmGroup
from gradsync.comm.shm_collectives import STAGE_BYTES
from gradsync.errors import BackendError, RankFailedError
from rank_pool import RankPool

LARGE = 3 * STAGE_BYTES // 4
PATIENCE_S = 60.0
GROUP_TIMEOUT_S = 120.0  # longer than any test has patience: what is seen in time was not a time-out

Member = Callable[[ShmGroup, int, Connection], Any]


class Party:
    """Processes of one shm group, outside any pool, to be killed."""

    def __init__(self, folder: Path, world: int, member: Member, timeout_s: float = GROUP_TIMEOUT_S) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (str(folder / "store"), rank, world, timeout_s, member, theirs)
            process = context.Process(target=_run_member, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def hear(self, rank: int) -> Any:
        assert self.pipes[rank].poll(PATIENCE_S), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def end(self) -> None:
        for process in self.processes:
            process.join(PATIENCE_S)
            assert process.exitcode is not None, "a rank does not end"
            process.close()


def _run_member(path: str, rank: int, world: int, timeout_s: float, member: Member, pipe: Connection) -> None:
    torch.set_num_threads(1)
    before = _resources()
    store = dist.FileStore(path, world)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=timeout_s)
    text = "no error"
    try:
        group = ShmGroup(store, rank, range(world), timeout)
        try:
            member(group, rank, pipe)
        finally:
            group.shutdown()
            del group
    except BackendError as error:
        text = str(error)
        error.__traceback__ = error.__context__ = error.__cause__ = None
    del store
    gc.collect()
    pipe.send((text, before, _resources()))


def _resources() -> dict[str, int]:
    """The descriptors of this process by kind, and its mappings of shared segments."""
    kinds: dict[str, int] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
        kind = target.split(":")[0] if ":" in target else target
        kinds[kind] = kinds.get(kind, 0) + 1
    kinds["mappings"] = Path("/proc/self/maps").read_text().count("memfd:gradsync")
    return kinds


def busy(group: ShmGroup, rank: int, pipe: Connection) -> None:
    """Operations of all kinds and sizes, the same on all ranks, without an end."""
    pipe.send("ready")
    chance = random.Random(0)
    world = group.size()
    shared = group.allocate(LARGE, torch.float32)
    while True:
        size = chance.choice([1, 1000, 20_000, LARGE])
        kind = chance.choice(["all_reduce", "in place", "broadcast", "all_gather", "reduce_scatter", "ring", "barrier"])
        tensor = torch.ones(size)
        if kind == "all_reduce":
            group.allreduce([tensor]).wait()
        elif kind == "in place":
            group.allreduce([shared.fill_(1.0)[:size]]).wait()
        elif kind == "broadcast":
            group.broadcast([tensor], root=chance.randrange(world)).wait()
        elif kind == "all_gather":
            group.allgather([[torch.empty(size) for _ in range(world)]], [tensor]).wait()
        elif kind == "reduce_scatter":
            group.reduce_scatter([torch.empty(size)], [[tensor] * world]).wait()
        elif kind == "ring":
            works = [
                group.send([tensor], (rank + 1) % world, 0),
                group.recv([torch.empty(size)], (rank - 1) % world, 0),
            ]
            for work in works:
                work.wait()
        else:
            group.barrier().wait()


def kill_one(folder: Path, world: int, seed: int, timeout_s: float, wait_for_ready: bool) -> None:
    chance = random.Random(seed)
    victim = chance.randrange(world)
    party = Party(folder, world, busy, timeout_s)
    if wait_for_ready:
        for rank in range(world):
            assert party.hear(rank) == "ready"
    time.sleep(chance.uniform(0, 0.3))
    party.kill(victim)
    for rank in range(world):
        if rank != victim:
            heard = party.hear(rank)
            text, before, after = party.hear(rank) if heard == "ready" else heard
            assert "rank" in text and str(victim) in text, f"rank {rank} blames another: {text}"
            if wait_for_ready:
                assert f"rank {victim} died" in text, f"rank {rank} blames another: {text}"
            assert after == before, "something was left open"
    party.end()


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_rank_is_named_and_leaves_nothing(tmp_path: Path, seed: int) -> None:
    kill_one(tmp_path, 2 + seed % 2, seed, GROUP_TIMEOUT_S, wait_for_ready=True)
    assert not [name for name in os.listdir("/dev/shm") if "gradsync" in name]


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(100))
def test_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    is_after_start = seed % 4 != 0
    kill_one(tmp_path, 2 + seed % 3, seed, GROUP_TIMEOUT_S if is_after_start else 3.0, is_after_start)
    assert not [name for name in os.listdir("/dev/shm") if "gradsync" in name]


def dies_with_a_child(group: ShmGroup, rank: int, pipe: Connection) -> None:
    group.barrier().wait()
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(PATIENCE_S)
            os._exit(0)
        pipe.send(child)
        os.kill(os.getpid(), signal.SIGKILL)
    group.allreduce([torch.ones(LARGE)]).wait()


def test_a_child_of_a_killed_rank_does_not_hide_its_death(tmp_path: Path) -> None:
    party = Party(tmp_path, 2, dies_with_a_child)
    child = party.hear(1)
    try:
        text, before, after = party.hear(0)
        assert "rank 1 died" in text and after == before
    finally:
        os.kill(child, signal.SIGKILL)
    party.end()


def dies_while_others_are_idle(group: ShmGroup, rank: int, pipe: Connection) -> None:
    group.barrier().wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.recv()
    for _ in range(2):  # the second time too
        with pytest.raises(BackendError, match="rank 1 died"):
            group.allreduce([torch.ones(3)]).wait()
    with pytest.raises(BackendError, match="rank 1 died"):
        group.send([torch.ones(3)], 2 - rank, 0)


def test_a_death_is_told_by_the_next_operation(tmp_path: Path) -> None:
    party = Party(tmp_path, 3, dies_while_others_are_idle)
    party.processes[1].join(PATIENCE_S)
    for rank in (0, 2):
        party.pipes[rank].send("go on")
    for rank in (0, 2):
        assert party.hear(rank)[0] == "no error"
    party.end()


def ends_early(group: ShmGroup, rank: int, pipe: Connection) -> None:
    group.barrier().wait()
    if rank == 2:
        return
    tensor = torch.full((LARGE,), float(rank))
    for _ in range(10):
        works = [group.send([tensor], 1 - rank, 0), group.recv([torch.empty(LARGE)], 1 - rank, 0)]
        for work in works:
            work.wait()
    pipe.send("the others went on")
    with pytest.raises(BackendError, match=r"rank 2 left the group.*same number of batches, or use join\(\)") as raised:
        group.barrier().wait()
    assert "".join(traceback.format_exception(raised.value)).count("Traceback") == 1
    with pytest.raises(BackendError, match="rank 2 left the group"):
        group.recv([tensor], 2, 0).wait()


def test_a_rank_that_leaves_in_peace_disturbs_only_who_needs_it(tmp_path: Path) -> None:
    party = Party(tmp_path, 3, ends_early)
    for rank in (0, 1):
        assert party.hear(rank) == "the others went on"
        assert party.hear(rank)[0] == "no error"
    party.end()


def too_late(rank: int, world: int, kind: str, size: int) -> None:
    with shm_group() as group:
        group.set_timeout(timedelta(seconds=0.3))  # for operations, not for the meeting of the ranks
        tensor = torch.ones(size)
        if rank == 1:
            dist.barrier()  # of the pool's group: rank 0 has given up by then
            match = "nothing came from rank 1|timed out"
        else:
            match = "timed out on rank 0.*(nothing came from rank 1|the other side)"
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: group.allreduce([tensor]),
            "broadcast": lambda: group.broadcast([tensor], root=1),
            "all_gather": lambda: group.allgather([[torch.empty(size)] * world], [tensor]),
            "message": lambda: group.recv([tensor], 1 - rank, 0),
            "barrier": lambda: group.barrier(),
        }
        with pytest.raises(BackendError, match=match):
            calls[kind]().wait()
            group.barrier().wait()  # what rank 0 sent before it gave up may have been enough for rank 1
        if rank == 0:
            dist.barrier()


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "all_gather", "message", "barrier"])
@pytest.mark.parametrize("size", [4, LARGE])
def test_a_timeout_names_the_missing_rank(ranks: RankPool, kind: str, size: int) -> None:
    ranks(too_late, kind, size)


def disagree(rank: int, world: int, left: int, right: int) -> None:
    with shm_group() as group:
        calls: list[Callable[[], Any]] = [
            lambda: group.allreduce([torch.ones(4)]),
            lambda: group.allreduce([torch.ones(5)]),
            lambda: group.allreduce([torch.ones(LARGE)]),
            lambda: group.allreduce([torch.ones(LARGE + 1)]),
            lambda: group.allreduce([torch.ones(4)], dist.ReduceOp.MAX),
            lambda: group.allreduce([torch.ones(4, dtype=torch.int32)]),
            lambda: group.broadcast([torch.ones(4)], root=0),
            lambda: group.broadcast([torch.ones(4)], root=1),
            lambda: group.allgather([[torch.ones(LARGE)] * 2], [torch.ones(LARGE)]),
            lambda: group.barrier(),
        ]
        with pytest.raises(BackendError, match="the ranks do not issue the same operation|its reason"):
            calls[(left, right)[rank]]().wait()
            group.barrier().wait()  # a root that only sends learns of it here


@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (2, 3), (0, 4), (0, 5), (0, 6), (2, 8), (6, 7), (2, 9), (8, 9)])
def test_ranks_that_do_not_issue_the_same_operation_are_told(ranks: RankPool, pair: tuple[int, int]) -> None:
    ranks(disagree, *pair)


def other_sizes(rank: int, world: int, left: int, right: int) -> None:
    sizes = (left, right)
    row = torch.ones(sizes[rank])
    calls: list[Callable[[Any], Any]] = [
        lambda group: group.allreduce([row]),
        lambda group: group.reduce([row], root=0),
        lambda group: group.allgather([[row, row.clone()]], [row]),
        lambda group: group.reduce_scatter([row], [[row.clone(), row.clone()]]),
    ]
    for call in calls:
        with shm_group() as group, pytest.raises(BackendError) as raised:
            call(group).wait()
            group.barrier().wait()  # who only sends learns of it here
        told = str(raised.value)
        names = [f"{size} element{'' if size == 1 else 's'} on rank {number}" for number, size in enumerate(sizes)]
        in_bytes = re.search(r"rank (.) sends (\d+) bytes to rank (.) .* expects (\d+)", told)
        if in_bytes:  # both in pieces
            sender, sent, receiver, expected = map(int, in_bytes.groups())
            assert (sent, expected) == (4 * sizes[sender], 4 * sizes[receiver]), told
        else:
            assert all(name in told for name in names), told


@pytest.mark.parametrize("sizes", [(3, 1), (4, LARGE), (LARGE, LARGE + 1)])
def test_ranks_whose_tensors_differ_in_size_are_told_the_sizes(ranks: RankPool, sizes: tuple[int, int]) -> None:
    ranks(other_sizes, *sizes)


def wrong_size_of_message(rank: int, world: int) -> None:
    with shm_group() as group, pytest.raises(BackendError, match="they must have the same size|its reason"):
        if rank == 0:
            group.send([torch.ones(LARGE)], 1, 0).wait()
        else:
            group.recv([torch.ones(5)], 0, 0).wait()


def test_a_message_of_the_wrong_size(ranks: RankPool) -> None:
    ranks(wrong_size_of_message)


def destroyed_while_running(rank: int, world: int) -> None:
    with shm_group() as group:
        if rank == 0:
            works = [group.allreduce([torch.ones(size)]) for size in (3, LARGE, 3)]
            works.append(group.recv([torch.ones(2)], 1, 0))
            futures = [work.get_future() for work in works]
            time.sleep(0.05)
            group.shutdown()
            for work, future in zip(works, futures, strict=True):
                with pytest.raises(BackendError, match="destroyed"):
                    work.wait()
                with pytest.raises(RuntimeError, match="destroyed"):
                    future.wait()
        dist.barrier()


def test_destroying_a_group_fails_what_runs(ranks: RankPool) -> None:
    ranks(destroyed_while_running)


def aborted(rank: int, world: int) -> None:
    with shm_group() as group:
        if rank == 0:
            time.sleep(0.05)
            group.abort()
        else:
            with pytest.raises(BackendError, match="rank 0 has aborted the group"):
                group.allreduce([torch.ones(LARGE)]).wait()


def test_abort_is_told_to_peers(ranks: RankPool) -> None:
    ranks(aborted)


def given_up_while_it_waits(rank: int, world: int, size: int) -> None:
    with shm_group() as group:
        if rank == 1:
            with pytest.raises(BackendError, match="rank 0 gave up.*: rank 1 failed in step 3: no batch"):
                group.recv([torch.ones(1)], 0, 0).wait()
            return
        threading.Timer(0.2, group.give_up, [RankFailedError("rank 1 failed in step 3: no batch")]).start()
        with pytest.raises(RankFailedError) as raised:
            group.allreduce([torch.ones(size)]).wait()
        told = "".join(traceback.format_exception(raised.value))
        assert told.count("Traceback") == 1, told
        assert told.endswith("RankFailedError: rank 1 failed in step 3: no batch\n"), told


@pytest.mark.parametrize("size", [4, LARGE])
def test_what_a_group_is_given_up_for_is_raised_as_it_is(ranks: RankPool, size: int) -> None:
    ranks(given_up_while_it_waits, size)


def error_in_torch_ddp(rank: int, world: int) -> None:
    with shm_group() as group:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
        group.set_timeout(timedelta(seconds=0.3))
        if rank == 0:
            with pytest.raises(RuntimeError, match="nothing came from rank 1"):
                model(torch.ones(1, 2)).sum().backward()
        dist.barrier()


def test_torch_ddp_raises_the_error(ranks: RankPool) -> None:
    ranks(error_in_torch_ddp)


def sizes_differ(rank: int, world: int, theirs: int, mine: int) -> None:
    """What rank 0 sends has ``theirs`` bytes, and rank 1 expects ``mine``; everything between others is right."""
    sent, expected = torch.ones(theirs, dtype=torch.uint8), torch.ones(mine, dtype=torch.uint8)
    calls: list[Callable[[Any], Any]] = [
        lambda group: group.broadcast([sent if rank == 0 else expected], root=0),
        lambda group: group.scatter(
            [sent.clone() if rank == 0 else expected], [[sent, sent]] if rank == 0 else [[]], root=0
        ),
        lambda group: (
            group.alltoall([torch.empty_like(sent), torch.empty_like(sent)], [sent, sent])
            if rank == 0
            else group.alltoall([expected, sent], [sent, sent])
        ),
    ]
    for call in calls:
        with shm_group() as group, pytest.raises(BackendError) as raised:
            call(group).wait()
            group.barrier().wait()  # who only sends a little learns of it here
        assert re.search(f"rank 0 sends {theirs} bytes to rank 1 in .* rank 1 expects {mine}", str(raised.value))


@pytest.mark.parametrize("sizes", [(LARGE // 2, LARGE), (LARGE, LARGE // 2), (LARGE, LARGE + 1), (40_000, 2 * LARGE)])
def test_readers_that_expect_another_amount_are_told_with_the_sizes(ranks: RankPool, sizes: tuple[int, int]) -> None:
    ranks(sizes_differ, *sizes)


def nothing_differs(rank: int, world: int, sent: int, expected: int) -> None:
    rows = [torch.ones(1), torch.ones(sent)] if rank == 0 else [torch.ones(1), torch.ones(1)]
    room = [torch.ones(1), torch.ones(1)] if rank == 0 else [torch.ones(expected), torch.ones(1)]
    with shm_group() as group, pytest.raises(BackendError) as raised:
        group.alltoall(room, rows).wait()
        group.barrier().wait()
    assert f"rank 0 sends {4 * sent} bytes to rank 1" in str(raised.value)


@pytest.mark.parametrize("sizes", [(3, 4), (4, 3), (0, 1), (1, 0), (0, LARGE)])
def test_all_to_all_with_rows_of_other_sizes(ranks: RankPool, sizes: tuple[int, int]) -> None:
    ranks(nothing_differs, *sizes)


@contextlib.contextmanager
def few_descriptors(num_left: int) -> Iterator[None]:
    """Let this process open only so many more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + num_left + 1, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:  # the numbers in use have gaps
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(num_left):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def out_of_descriptors(rank: int, world: int, poor_rank: int) -> None:
    with (
        few_descriptors(3) if rank == poor_rank else contextlib.nullcontext(),
        pytest.raises(BackendError, match=rf"rank {poor_rank} cannot take part.*ulimit -n"),
    ):
        new_group(timeout_s=60.0)


@pytest.mark.parametrize("poor_rank", [0, 1])
def test_a_rank_without_descriptors_is_named_by_all(poor_rank: int) -> None:
    with contextlib.closing(RankPool(2)) as pool:  # torch keeps what is left of a group that was not made
        pool(out_of_descriptors, poor_rank)


def used_in_a_child(group: ShmGroup, rank: int, pipe: Connection) -> None:
    group.barrier().wait()
    child = os.fork()
    if child == 0:
        try:
            group.barrier().wait()
        except BackendError as error:
            pipe.send(str(error))
        os._exit(0)
    os.waitpid(child, 0)
    group.barrier().wait()


def test_a_forked_child_is_told_whose_the_group_is(tmp_path: Path) -> None:
    party = Party(tmp_path, 2, used_in_a_child)
    for rank in (0, 1):
        assert f"in a child that was forked from rank {rank}" in party.hear(rank)
        assert party.hear(rank)[0] == "no error"
    party.end()


def alone(group: ShmGroup, rank: int, pipe: Connection) -> None:
    raise AssertionError("the group must not come into being")


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    party = Party(tmp_path, 1, alone)
    party.kill(0)
    party.end()
    store = dist.FileStore(str(tmp_path / "other"), 3)  # type: ignore[attr-defined]
    store.set("shm/card/0", '{"address": "00", "secret": "00"}')  # of a process that is gone
    with pytest.raises(BackendError, match="rank 0, 2"):
        ShmGroup(store, 1, range(3), timedelta(seconds=0.3))


def leave_without_a_word(path: str, rank: int) -> None:
    store = dist.FileStore(path, 2)  # type: ignore[attr-defined]
    group = ShmGroup(store, rank, range(2), timedelta(seconds=GROUP_TIMEOUT_S))
    group.barrier().wait()
    with contextlib.suppress(BackendError):  # rank 1 may have left already
        if rank == 0:
            group.allreduce([torch.ones(LARGE)])
            group.recv([torch.ones(LARGE)], 1, 0)


LEAVE_WITHOUT_A_WORD = """
import sys
sys.path[:] = {path}
import test_shm_failures
test_shm_failures.leave_without_a_word({store!r}, {rank})
"""


def test_a_process_ends_in_peace_with_operations_open(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    children = [context.Process(target=leave_without_a_word, args=(str(tmp_path / "one"), rank)) for rank in (0, 1)]
    for child in children:
        child.start()
    for child in children:
        child.join(PATIENCE_S)
        assert child.exitcode == 0

    programs = [LEAVE_WITHOUT_A_WORD.format(path=sys.path, store=str(tmp_path / "two"), rank=rank) for rank in (0, 1)]
    started = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    assert [each.wait(2 * PATIENCE_S) for each in started] == [0, 0]
