"""Asynchronous operations of the shm backend: order, overlap, futures, time limits of callers, messages."""

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm_jobs import numbers, shm_group

from gradsync.comm.shm_collectives import STAGE_BYTES
from gradsync.comm.shm_messages import PIECE_BYTES
from gradsync.ddp.bucket import storage_count
from gradsync.errors import BackendError
from rank_pool import RankPool

LARGE = STAGE_BYTES // 4 + 100
PATIENCE_S = 60.0


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)


def work_in_any_order(rank: int, world: int) -> None:
    generator = torch.Generator().manual_seed(7)
    with shm_group() as group:
        for waiting in ("forwards", "backwards", "last only"):
            sizes = [int(size) for size in torch.tensor([3, 500, LARGE])[torch.randint(3, (16,), generator=generator)]]
            tensors = [numbers(rank, size, torch.float32, salt) for salt, size in enumerate(sizes)]
            works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
            if waiting == "last only":
                works[-1].wait()
            for work in works if waiting == "forwards" else reversed(works):
                work.wait()
            for salt, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
                wanted = sum(numbers(peer, size, torch.float32, salt) for peer in range(world))
                assert torch.equal(tensor, wanted)


def test_works_are_run_in_order_however_they_are_waited_for(ranks: RankPool, ranks3: RankPool) -> None:
    ranks(work_in_any_order)
    ranks3(work_in_any_order)


def completes_unattended(rank: int, world: int) -> None:
    with shm_group() as group:
        for size in (3, LARGE):
            tensor = torch.ones(size)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            until(work.is_completed)
            assert work.is_success() and work.exception() is None and work.result()[0] is tensor
            assert tensor.eq(world).all()


def test_a_work_completes_without_being_waited_for(ranks: RankPool) -> None:
    ranks(completes_unattended)


def issue_never_blocks(rank: int, world: int) -> None:
    with shm_group() as group:
        for size in (3, LARGE):
            tensor, message = torch.ones(size), torch.zeros(2)
            if rank == 0:
                work = dist.all_reduce(tensor, group=group, async_op=True)
                dist.send(message + 5, 1, group)
            else:
                dist.recv(message, 0, group)  # rank 1 joins only after this
                assert message.eq(5).all()
                work = dist.all_reduce(tensor, group=group, async_op=True)
            work.wait()
            assert tensor.eq(2).all()


def test_issuing_an_operation_does_not_wait_for_peers(ranks: RankPool) -> None:
    ranks(issue_never_blocks)


def futures(rank: int, world: int) -> None:
    with shm_group() as group:
        for size in (3, LARGE):
            early = dist.all_reduce(torch.ones(size), group=group, async_op=True).get_future()
            halved = early.then(lambda future: future.value()[0] / 2)
            assert halved.wait().eq(world / 2).all()
            work = dist.all_reduce(torch.ones(size), group=group, async_op=True)
            work.wait()
            assert work.get_future().done()
            assert work.get_future().wait()[0].eq(world).all()

        def reduce_again(future: Any) -> Any:
            again = dist.all_reduce(future.value()[0], group=group, async_op=True)
            return again.get_future().wait()[0]

        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        nested = work.get_future().then(reduce_again).then(lambda future: future.value() + 0)
        assert nested.wait().eq(world * world).all()

        works = group.allreduce_coalesced([torch.ones(2), torch.ones(LARGE)])
        assert [tensor[0].item() for tensor in works.get_future().wait()] == [world, world]
        assert works.wait() and works.is_completed() and works.is_success()
        assert works.exception() is None and len(works.result()) == 2


def test_futures_and_callbacks_that_wait(ranks: RankPool) -> None:
    ranks(futures)


def impatient(rank: int, world: int) -> None:
    with shm_group() as group:
        for size in (3, LARGE):
            tensor = torch.ones(size)
            if rank == 0:
                work = dist.all_reduce(tensor, group=group, async_op=True)
                with pytest.raises(BackendError, match="not complete after the 0.05 s"):
                    work.wait(timedelta(milliseconds=50))
                dist.barrier()
            else:
                dist.barrier()
                work = dist.all_reduce(tensor, group=group, async_op=True)
            work.wait()
            assert tensor.eq(2).all()


def test_a_caller_may_stop_waiting_and_wait_again(ranks: RankPool) -> None:
    ranks(impatient)


def from_threads(rank: int, world: int) -> None:
    with shm_group() as first, shm_group() as second:
        errors: list[BaseException] = []

        def run(group: Any, size: int) -> None:
            try:
                for _ in range(20):
                    tensor = torch.ones(size)
                    dist.all_reduce(tensor, group=group)
                    assert tensor.eq(world).all()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=arguments) for arguments in ((first, 3), (second, LARGE))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors


def test_groups_are_independent_of_each_other(ranks: RankPool) -> None:
    ranks(from_threads)


def inputs_are_kept(rank: int, world: int) -> None:
    with shm_group() as group:
        for size in (3, LARGE):
            outputs = [torch.empty(size) for _ in range(world)]
            value = group.allocate(size, torch.float32).fill_(rank)
            work = dist.all_gather(outputs, value, group, async_op=True)
            del value  # its memory must not be reused before the operation is over
            other = group.allocate(size, torch.float32).fill_(99)
            work.wait()
            assert all(outputs[peer].eq(peer).all() for peer in range(world)) and other.eq(99).all()


def test_inputs_live_until_the_operation_is_over(ranks: RankPool) -> None:
    ranks(inputs_are_kept)


def messages(rank: int, world: int) -> None:
    following, preceding = (rank + 1) % world, (rank - 1) % world
    with shm_group() as group:
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
            for size in (0, 1, 1000, PIECE_BYTES, 3 * PIECE_BYTES + 17):
                for is_shared in (False, True):
                    outgoing = numbers(rank, size, dtype)
                    if is_shared:
                        outgoing = group.allocate(size, dtype).copy_(outgoing)
                    incoming = torch.empty(size, dtype=dtype)
                    works = [dist.isend(outgoing, following, group), dist.irecv(incoming, preceding, group)]
                    for work in works:
                        work.wait()
                    assert torch.equal(incoming, numbers(preceding, size, dtype))


def test_messages_around_a_ring(ranks: RankPool, ranks3: RankPool) -> None:
    ranks(messages)
    ranks3(messages)


def tags_and_order(rank: int, world: int) -> None:
    with shm_group() as group:
        sizes = [2, 70_000, 3, PIECE_BYTES, 4]
        if rank == 0:
            works = [
                dist.isend(torch.full((size,), 10.0 * tag + index), 1, group, tag)
                for index, size in enumerate(sizes)
                for tag in (0, 1, 2)
            ]
            for work in works:
                work.wait()
        else:
            for tag in (2, 0, 1):
                for index, size in enumerate(sizes):
                    tensor = torch.empty(size)
                    dist.recv(tensor, 0, group, tag)
                    assert tensor.eq(10.0 * tag + index).all()


def test_messages_keep_their_order_within_a_tag(ranks: RankPool) -> None:
    ranks(tags_and_order)


def from_anybody(rank: int, world: int) -> None:
    with shm_group() as group:
        for size in (2, 100_000):
            if rank == 0:
                seen = []
                for _ in range(world - 1):
                    tensor = torch.empty(size)
                    source = dist.recv(tensor, group=group)
                    assert tensor.eq(source).all()
                    seen.append(source)
                assert sorted(seen) == list(range(1, world))
            else:
                dist.send(torch.full((size,), float(rank)), 0, group)
            dist.barrier(group)


def test_receive_from_anybody(ranks3: RankPool) -> None:
    ranks3(from_anybody)


def many_unread_messages(rank: int, world: int) -> None:
    with shm_group() as group:
        works = [dist.isend(torch.full((5000,), float(index)), 1 - rank, group) for index in range(300)]
        for index in range(300):
            tensor = torch.empty(5000)
            dist.recv(tensor, 1 - rank, group)
            assert tensor.eq(index).all()
        for work in works:
            work.wait()
        to_self = torch.empty(3, 2)
        receive = dist.irecv(to_self.t(), rank, group)
        dist.isend(torch.arange(6.0).reshape(2, 3), rank, group).wait()
        receive.wait()
        assert torch.equal(to_self.t(), torch.arange(6.0).reshape(2, 3))
        operations = [
            dist.P2POp(dist.isend, torch.full((9,), float(rank)), 1 - rank, group),
            dist.P2POp(dist.irecv, tensor := torch.empty(9), 1 - rank, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert tensor.eq(1 - rank).all()


def test_messages_may_be_sent_long_before_they_are_received(ranks: RankPool) -> None:
    ranks(many_unread_messages)


def future_of_a_message(rank: int, world: int) -> None:
    with shm_group() as group:
        tensor = torch.full((4,), float(rank))
        if rank == 0:
            dist.send(tensor, 1, group)
        else:
            work = dist.irecv(tensor, 0, group)
            assert work.get_future().then(lambda future: future.value()[0] + 1).wait().eq(1).all()
            until(work.is_completed)


def test_a_received_message_has_a_future(ranks: RankPool) -> None:
    ranks(future_of_a_message)


def coalesced(rank: int, world: int) -> None:
    with shm_group() as group:
        for device in (None, torch.device("cpu")):
            for is_async in (False, True):
                tensors = [torch.full((size,), rank + 1.0) for size in (3, LARGE, 5)]
                with dist._coalescing_manager(group, device, is_async) as manager:
                    for tensor in tensors:
                        dist.all_reduce(tensor, group=group, async_op=is_async and device is not None)
                if is_async:
                    manager.wait()
                assert all(tensor.eq(world * (world + 1) / 2).all() for tensor in tensors)


def test_coalesced_operations(ranks: RankPool) -> None:
    ranks(coalesced)


def operations_let_go(rank: int, world: int) -> None:
    """Without a collection of cycles: what an operation has held would be memory that nobody can use until then."""
    with shm_group() as group:
        mine, whole = torch.ones(LARGE), torch.ones(world * LARGE)
        parts = list(whole.view(world, LARGE).unbind()) if rank == 0 else None
        operations = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group, async_op=True),
            "broadcast": lambda: dist.broadcast(whole, 0, group=group, async_op=True),
            "reduce": lambda: dist.reduce(whole, 0, group=group, async_op=True),
            "all_gather": lambda: group._allgather_base(whole, mine),
            "reduce_scatter": lambda: group._reduce_scatter_base(mine, whole),
            "all_to_all": lambda: dist.all_to_all_single(whole, torch.ones_like(whole), group=group, async_op=True),
            "gather": lambda: dist.gather(mine, parts, group=group, async_op=True),
            "scatter": lambda: dist.scatter(mine, parts, group=group, async_op=True),
        }
        before = [storage_count(mine), storage_count(whole)]
        gc.collect()
        gc.disable()
        try:
            for operation in operations.values():
                operation().wait()
                until(lambda: [storage_count(mine), storage_count(whole)] == before)
        finally:
            gc.enable()


def test_an_operation_that_is_over_holds_no_memory(ranks: RankPool) -> None:
    ranks(operations_let_go)
