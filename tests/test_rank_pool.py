"""The pool of ranks itself: results, exceptions, hangs, deaths, warnings and recovery."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from rank_pool import RankFailure, RankHangError, RankJobError, RankPool


def _sum_of_ranks(rank: int, world: int, scale: float = 1.0) -> torch.Tensor:
    tensor = torch.full((3,), float(rank + 1)) * scale
    dist.all_reduce(tensor)
    return tensor


def _process_id(rank: int, world: int) -> int:
    return os.getpid()


def _settings(rank: int, world: int) -> tuple[int, int, int, float]:
    return rank, dist.get_rank(), torch.get_num_threads(), torch.rand(()).item()


def _raise_on(rank: int, world: int, guilty: int) -> str:
    if rank == guilty:
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise ValueError(f"bad thing on {rank}") from error
    return "fine"


def _raise_while_peers_wait(rank: int, world: int) -> None:
    if rank == 0:
        raise ValueError("gone before the collective")
    dist.barrier()


def _sleep_on(rank: int, world: int, guilty: int) -> None:
    if rank == guilty:
        time.sleep(60)


def _die_on(rank: int, world: int, guilty: int) -> str:
    if rank == guilty:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def _warn(rank: int, world: int) -> int:
    warnings.warn(f"careful {rank}", UserWarning, stacklevel=1)
    return rank


def _unpicklable(rank: int, world: int) -> object:
    return lambda: None


def _one_collective_too_many(rank: int, world: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def _chain(rank: int, world: int) -> None:
    """Sends and receives whose number differs from rank to rank."""
    token = torch.zeros(1)
    if rank > 0:
        dist.recv(token, rank - 1)
    if rank < world - 1:
        dist.send(token, rank + 1)


def _destroy_group(rank: int, world: int) -> None:
    dist.destroy_process_group()


def test_results_come_back_by_rank(ranks: RankPool) -> None:
    results = ranks(_sum_of_ranks, scale=2.0)
    assert [result.tolist() for result in results] == [[6.0] * 3] * 2


@pytest.mark.parametrize("world", [3, 4])
def test_larger_worlds(world: int, request: pytest.FixtureRequest) -> None:
    results = request.getfixturevalue(f"ranks{world}")(_sum_of_ranks)
    assert [result[0].item() for result in results] == [world * (world + 1) / 2] * world


def test_processes_are_kept_between_jobs(ranks: RankPool) -> None:
    first = ranks(_process_id)
    assert ranks(_process_id) == first == ranks.process_ids()
    assert len({*first, os.getpid()}) == 3


def test_every_job_starts_with_one_thread_and_the_same_seed(ranks: RankPool) -> None:
    first, second = ranks(_settings), ranks(_settings)
    assert first == second
    assert [setting[:3] for setting in first] == [(0, 0, 1), (1, 1, 1)]


def test_an_exception_is_told_with_its_cause_and_the_pool_recovers(ranks: RankPool) -> None:
    before = ranks(_process_id)
    with pytest.raises(RankJobError, match="bad thing on 1") as caught:
        ranks(_raise_on, 1)
    assert "the cause" in str(caught.value)
    assert "rank 0 of 2 ---\nfinished" in str(caught.value)
    assert set(caught.value.failures) == {1}
    assert set(ranks(_process_id)).isdisjoint(before)


def test_an_exception_ends_the_wait_of_the_peers(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rank_pool.GRACE_S", 0.2)
    with pytest.raises(RankJobError, match="gone before the collective") as caught:
        ranks(_raise_while_peers_wait)
    assert not isinstance(caught.value, RankHangError)
    assert caught.value.failures[1].type_name == "Hung"
    assert "barrier" in caught.value.failures[1].traceback


def test_a_hang_shows_the_stacks_and_the_pool_recovers(ranks: RankPool) -> None:
    with pytest.raises(RankHangError, match="_sleep_on") as caught:
        ranks(_sleep_on, 0, timeout_s=1.0)
    assert set(caught.value.failures) == {0}
    assert ranks(_sum_of_ranks)[0].tolist() == [3.0] * 3


def test_a_death_is_told_with_its_exit_code_and_the_pool_recovers(ranks: RankPool) -> None:
    with pytest.raises(RankJobError, match="exit code -9") as caught:
        ranks(_die_on, 1)
    assert caught.value.failures[1].type_name == "Died"
    assert ranks(_sum_of_ranks)[0].tolist() == [3.0] * 3


def test_a_rank_that_died_between_jobs_is_replaced(ranks: RankPool) -> None:
    victim = ranks(_process_id)[1]
    os.kill(victim, signal.SIGKILL)
    while os.path.exists(f"/proc/{victim}/stat"):
        time.sleep(0.01)
    assert ranks(_sum_of_ranks)[1].tolist() == [3.0] * 3


def test_expected_failures_come_back_as_values(ranks: RankPool) -> None:
    before = ranks(_process_id)
    failure, result = ranks.run_expecting(_raise_on, 0)
    assert isinstance(failure, RankFailure)
    assert failure.type_name == "ValueError"
    assert failure.text == "ValueError: bad thing on 0\ncaused by: KeyError: 'the cause'"
    assert failure.seconds >= 0
    assert result == "fine"
    assert set(ranks(_process_id)).isdisjoint(before)


def test_an_expected_death_comes_back_as_a_value(ranks: RankPool) -> None:
    alive, dead = ranks.run_expecting(_die_on, 1)
    assert alive == "alive"
    assert dead.type_name == "Died"


def test_a_hang_is_never_expected(ranks: RankPool) -> None:
    with pytest.raises(RankHangError, match="_sleep_on"):
        ranks.run_expecting(_sleep_on, 1, timeout_s=1.0)


def test_warnings_are_errors_unless_asked_for(ranks: RankPool) -> None:
    with pytest.raises(RankJobError, match="UserWarning: careful 0"):
        ranks(_warn)
    assert ranks(_warn, warnings_as_errors=False) == [0, 1]
    assert ranks.run_with_warnings(_warn) == [
        (0, ["UserWarning: careful 0"]),
        (1, ["UserWarning: careful 1"]),
    ]


def test_a_result_that_cannot_travel_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankJobError, match="pickle"):
        ranks(_unpicklable)


def test_a_job_that_leaves_its_ranks_out_of_step_is_refused(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rank_pool.GRACE_S", 0.2)
    with pytest.raises(RankJobError, match="out of step: operations on the group were rank 0: 1, rank 1: 0"):
        ranks.close()
        ranks(_one_collective_too_many)
    assert ranks(_sum_of_ranks)[0].tolist() == [3.0] * 3


def test_sends_and_receives_do_not_count_as_out_of_step(ranks3: RankPool) -> None:
    before = ranks3(_process_id)
    assert ranks3(_chain) == [None] * 3
    assert ranks3(_process_id) == before


def test_a_job_may_destroy_the_group(ranks: RankPool) -> None:
    ranks(_destroy_group)
    assert ranks(_sum_of_ranks)[0].tolist() == [3.0] * 3
