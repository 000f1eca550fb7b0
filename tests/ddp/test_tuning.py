"""Buckets cut to fit the link: the best partition, and training with it."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp.reference import OneProcess, assert_same_gradients, digest, in_quarters, plain
from gradsync import DistributedDataParallel
from gradsync.ddp.tuning import Link, ReadyTimes, choose_ends, fit_link
from rank_pool import RankPool

seconds = st.floats(0, 1, allow_nan=False)


def time_done(ends, ready, sizes, backward, link):
    """When the last bucket is done, as the doc of the module tells it."""
    done, begin = 0.0, 0
    for end in ends:
        leaves = max(ready[begin:end])
        if end == ends[-1]:
            leaves = max(leaves, backward)
        size = sum(sizes[begin:end])
        done = max(done, max(leaves, *ready[:end]) + link.copying(size)) + link.seconds(size)
        begin = end
    return done


@given(
    st.lists(st.tuples(seconds, st.integers(1, 1000)), min_size=1, max_size=7),
    seconds,
    st.floats(0, 0.1),
    st.floats(0, 1e-3),
    st.floats(0, 1e-3),
)
def test_no_partition_is_done_earlier(parameters, backward, latency, s_per_byte, copy_s_per_byte):
    ready, sizes = [r for r, _ in parameters], [s for _, s in parameters]
    link, count = Link(latency, s_per_byte, copy_s_per_byte), len(parameters)
    chosen = choose_ends(ready, sizes, backward, link)
    assert chosen == sorted(set(chosen)) and chosen[-1] == count
    every = (
        [*(position + 1 for position in range(count - 1) if cut[position]), count]
        for cut in itertools.product((False, True), repeat=count - 1)
    )
    best = min(time_done(ends, ready, sizes, backward, link) for ends in every)
    assert time_done(chosen, ready, sizes, backward, link) == pytest.approx(best)


def test_many_small_parameters_are_cut_at_few_places():
    ends = choose_ends([i * 1e-6 for i in range(5000)], [4] * 5000, 1.0, Link(1e-9, 1e-9))
    assert ends[-1] == 5000 and 1 < len(ends) <= 256


def test_a_link_is_fitted_through_the_medians():
    link = fit_link(1000, [2.0, 1.0, 9.0], 3000, [3.0, 3.0, 50.0])
    assert (link.latency_s, link.s_per_byte) == pytest.approx((1.5, 0.0005))
    assert fit_link(1000, [2.0], 3000, [1.0]).s_per_byte == 0.0
    assert fit_link(1000, [2.0], 3000, [1.0], copy_s=6.0).copy_s_per_byte == 0.002
    assert fit_link(1000, [1.0], 3000, [3.0]).latency_s > 0  # a bucket is never for nothing


def test_what_never_arrived_counts_as_arriving_at_the_end():
    times = ReadyTimes(2)
    for _ in range(3):
        assert not times.is_complete
        times.current[1] = 0.25
        times.end_pass(2.0)
    assert times.is_complete and times.medians() == [2.0, 0.25, 2.0]


def _net() -> nn.Module:
    return in_quarters(nn.Sequential(*[nn.Linear(3, 3) for _ in range(6)]))


def _tuned(rank: int, world: int) -> tuple[str, list[tuple[int, ...]], bool]:
    ddp = DistributedDataParallel(_net(), bucket_cap_mb="auto")
    reference = OneProcess(_net(), world)
    for step in range(8):
        if step == 6:  # after the buckets were cut: another set of parameters starts it all over
            for module in (ddp.module, reference.module):
                module[2].requires_grad_(False)
        plain(ddp, rank, step)
        reference.run(plain, step)
        assert_same_gradients(ddp.module, reference.module, f"step {step}")
        if step % 2:
            ddp.zero_grad()
            reference.module.zero_grad()
        if step == 5:
            buckets = [bucket.indices for bucket in ddp.reducer.plan.buckets]
            measures_still = ddp.reducer.times is not None
    return digest(ddp.module), buckets, measures_still


def test_gradients_stay_right_while_the_buckets_are_cut_anew(ranks: RankPool) -> None:
    first, second = ranks(_tuned)
    assert first == second
    assert sorted(index for bucket in first[1] for index in bucket) == list(range(12))
    assert not first[2]


def _mixed_dtypes(rank: int, world: int) -> list[set[torch.dtype]]:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double(), nn.Linear(3, 3))
    net[1].register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    net[1].register_forward_hook(lambda _, __, output: output.float())
    ddp = DistributedDataParallel(net, bucket_cap_mb="auto")
    for _ in range(6):
        ddp(torch.ones(2, 3)).sum().backward()
    plan = ddp.reducer.plan
    return [{plan.specs[index].dtype for index in bucket.indices} for bucket in plan.buckets]


def test_a_bucket_never_mixes_dtypes(ranks: RankPool) -> None:
    for kinds in ranks(_mixed_dtypes):
        assert all(len(kind) == 1 for kind in kinds) and set.union(*kinds) == {torch.float32, torch.float64}
