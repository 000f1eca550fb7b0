"""No wait of the library is without an end: whoever waits raises within the soft limit and names who does not come."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

import gradsync
from gradsync.comm import private
from gradsync.comm.groups import exchange_text
from gradsync.comm.waits import FutureEnd, waits_of
from gradsync.comm.watches import set_soft_limit
from gradsync.ddp import recording, tuned_plan
from gradsync.errors import StalledError
from rank_pool import RankJobError

LIMIT_S = 2.0  # less, and ranks of a busy machine are taken for late ones
LATE_S = 0.3


def default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


class LateError(Exception):
    """Raised by the rank that holds the others up."""


def be_late(*_: Any) -> None:
    """Come only when the other rank has told that it waited in vain, however long that takes on a busy machine."""
    store = default_store()
    while not store.check(["told"]):
        time.sleep(LATE_S)
    raise LateError("too late")


def wrapped(**options: Any) -> gradsync.DistributedDataParallel:
    return gradsync.DistributedDataParallel(nn.Linear(4, 4), soft_limit_s=LIMIT_S, **options)


def backward(ddp: gradsync.DistributedDataParallel) -> None:
    ddp(torch.ones(2, 4)).sum().backward()


def gather_of_zero(is_late: bool) -> None:
    ddp = wrapped()
    optimizer = gradsync.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1)
    backward(ddp)
    optimizer.step()
    backward(ddp)
    if is_late:
        be_late()
    optimizer.step()


def norm_of_zero(is_late: bool) -> None:
    ddp = wrapped()
    optimizer = gradsync.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1)
    backward(ddp)
    if is_late:
        be_late()
    optimizer.clip_grad_norm_(1.0)


def tuned_buckets(is_late: bool) -> None:
    if is_late:
        tuned_plan._measure_link = be_late  # type: ignore[assignment]
    ddp = wrapped(bucket_cap_mb="auto")
    for _ in range(20):
        backward(ddp)
        ddp.zero_grad()
    raise AssertionError("no plan was tuned")


def mean_of_buffers(is_late: bool) -> None:
    ddp = gradsync.DistributedDataParallel(nn.BatchNorm1d(4), soft_limit_s=LIMIT_S)
    if is_late:
        be_late()
    ddp.sync_buffers("mean")


def gradients_by_hand(is_late: bool) -> None:
    ddp = wrapped()
    if is_late:
        be_late()
    ddp.all_reduce_grads([torch.ones(3)])


def making_a_group(is_late: bool) -> None:
    if is_late:
        private._new_group = be_late  # type: ignore[assignment]
    wrapped()


def normalised(is_late: bool, late_in: str) -> None:
    ddp = gradsync.DistributedDataParallel(nn.SyncBatchNorm(4), soft_limit_s=LIMIT_S)
    if is_late and late_in == "backward":
        ddp.module.register_forward_hook(be_late)
    if is_late and late_in == "forward":
        be_late()
    backward(ddp)


def statistics_of_all(is_late: bool) -> None:
    normalised(is_late, "forward")


def sums_of_all_in_backward(is_late: bool) -> None:
    normalised(is_late, "backward")


def batches_of_the_others(is_late: bool) -> None:
    ddp = wrapped()
    with ddp.join():
        for _ in range(3 if is_late else 1):
            backward(ddp)
        if is_late:
            be_late()


def clocks_of_a_profile(is_late: bool) -> None:
    ddp = wrapped()
    if is_late:
        recording.clock_offset = be_late  # type: ignore[assignment]
    with gradsync.profile(ddp, steps=1):
        backward(ddp)


@pytest.mark.parametrize(
    "wait",
    [
        gather_of_zero,
        norm_of_zero,
        tuned_buckets,
        mean_of_buffers,
        gradients_by_hand,
        making_a_group,
        statistics_of_all,
        sums_of_all_in_backward,
        batches_of_the_others,
        clocks_of_a_profile,
    ],
)
def test_a_rank_that_does_not_come_is_named(ranks: Any, wait: Callable[[bool], None]) -> None:
    with pytest.raises(RankJobError) as caught:
        ranks(run, wait)
    failures = caught.value.failures
    assert failures[0].type_name == "StalledError", failures[0].traceback
    assert "the odd one out is rank 1: " in failures[0].text
    assert "in be_late: time.sleep(LATE_S)" in failures[0].text


def run(rank: int, world: int, wait: Callable[[bool], None]) -> None:
    set_soft_limit(LIMIT_S)
    try:
        wait(rank == 1)
    except StalledError:
        default_store().set("told", "")
        raise


def hook_without_an_end(rank: int, world: int) -> None:
    ddp = wrapped()
    ddp.register_comm_hook(None, lambda state, bucket: Future())
    backward(ddp)


def test_a_hook_whose_future_never_completes_does_not_wait_for_the_time_out_of_the_group(ranks: Any) -> None:
    with pytest.raises(RankJobError) as caught:
        ranks(hook_without_an_end)
    for failure in caught.value.failures.values():
        assert failure.type_name == "StalledError", failure.traceback


def result_from_another_thread(rank: int, world: int) -> tuple[list[str], str]:
    group: Any = dist.group.WORLD
    waits = waits_of(group)
    texts = waits.beside(lambda: exchange_text(group, str(rank), torch.device("cpu")))
    with pytest.raises(LateError) as caught:
        waits.beside(fail)
    return texts, str(caught.value)


def fail() -> None:
    raise LateError("as it was")


def test_what_runs_beside_returns_and_raises_as_it_would_here(ranks: Any) -> None:
    assert ranks(result_from_another_thread) == [(["0", "1"], "as it was")] * 2


def test_a_future_is_over_when_its_time_is() -> None:
    late = FutureEnd(Future(), 0.01, lambda: LateError("by then"))
    while not late.is_completed():
        time.sleep(0.001)
    with pytest.raises(LateError):
        late.wait()
