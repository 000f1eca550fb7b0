"""What a wrapped model tells of its passes, with real ranks: report, profile, stragglers, replica and finite checks."""

import json
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.comm.clocks import clock_offset
from gradsync.ddp.module import DistributedDataParallel
from gradsync.ddp.replica_check import digests
from gradsync.errors import ConfigError, ContractError, NonFiniteError


def make_ddp(**options):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    return DistributedDataParallel(model, bucket_cap_mb=0.004, **options)


def train(ddp, num_steps, before_forward=lambda step: None, before_backward=lambda step: None):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(num_steps):
        optimizer.zero_grad()
        before_forward(step)
        loss = ddp(torch.randn(8, 32)).square().mean()
        before_backward(step)
        loss.backward()
        optimizer.step()


def report_after_training(rank, world):
    ddp = make_ddp()
    train(ddp, 6)
    report = ddp.report()
    json.dumps(report.as_json(), allow_nan=False)
    return report


def test_every_pass_is_in_the_report(ranks):
    for rank, report in enumerate(ranks(report_after_training)):
        assert (report.rank, report.world_size) == (rank, 2)
        assert [record.number for record in report.passes] == list(range(6))
        assert [len(record.buckets) for record in report.passes] == [4] * 6
        names = [place.name for bucket in report.buckets for place in bucket.parameters]
        assert sorted(names) == sorted(f"{layer}.{kind}" for layer in range(4) for kind in ("weight", "bias"))
        assert report.groups[0].ranks == (0, 1)
        assert len(report.ranks) == 2
        for record in report.passes[1:]:
            phases = [span.phase for span in record.spans]
            assert phases == ["optimizer", "data", "forward", "backward", "finish"]
            assert all(a.end_s <= b.start_s for a, b in zip(record.spans, record.spans[1:], strict=False))
            launches = [bucket.launched_s for bucket in record.buckets]
            assert launches == sorted(launches)
            assert all(bucket.done_s >= bucket.launched_s for bucket in record.buckets)
            # all but the last were ready, and left, before backward was over
            assert all(b.ready_s <= b.launched_s <= record.spans[3].end_s for b in record.buckets[:-1])
            assert record.buckets[-1].ready_s is None
        assert all(bucket.ready_s is None for bucket in report.passes[0].buckets), "nothing is known in the first pass"


def stragglers_by_rank(rank, world, phase):
    ddp = make_ddp()

    def dawdle(step):
        if rank == 1:
            time.sleep(0.03)

    train(ddp, 5, **{{"data": "before_forward", "forward": "before_backward"}[phase]: dawdle})
    late = ddp.report().straggler
    return (late.rank, late.phase, late.delay_s > 0.015), ddp.report().verdict


@pytest.mark.parametrize("phase", ["data", "forward"])
def test_the_rank_that_is_late_is_named_on_every_rank(ranks, phase):
    for found, verdict in ranks(stragglers_by_rank, phase):
        assert found == (1, phase, True)
        assert "rank 1 is late by" in verdict


def profile_with_files(rank, world, folder):
    ddp = make_ddp()
    with gradsync.profile(ddp, steps=3, out=folder) as profile:
        train(ddp, 4)
        with pytest.raises(ConfigError, match="once its 'with' block is left"):
            profile.save_page("never.html")
    train(ddp, 1)
    return profile.recording, profile.verdict, [p.is_exact for p in ddp.report().passes]


def test_a_profile_records_all_ranks_exactly_and_writes_trace_and_page(ranks, tmp_path):
    for recording, verdict, is_exact in ranks(profile_with_files, tmp_path / "out"):
        assert [[p["number"] for p in rank["passes"]] for rank in recording["ranks"]] == [[0, 1, 2]] * 2
        assert all(p["hidden_s"] is not None for rank in recording["ranks"] for p in rank["passes"])
        assert "communication hidden" in verdict
        assert is_exact == [True, True, True, False, False]
        # on one host there is one clock
        assert all(abs(rank["offset_s"]) < 0.05 for rank in recording["ranks"])
    assert len(json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]) > 20
    assert "</html>" in (tmp_path / "out" / "timeline.html").read_text()


def profile_of_slices(rank, world):
    ddp = make_ddp()
    optimizer = gradsync.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.01)
    with gradsync.profile(ddp, steps=4) as profile:
        for _ in range(4):
            optimizer.zero_grad()
            ddp(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
    return profile.verdict, [span.phase for span in profile.report.passes[-1].spans]


def test_a_sharded_optimizer_can_be_profiled(ranks):
    for verdict, phases in ranks(profile_of_slices):
        assert "ms" in verdict
        assert phases == ["optimizer", "data", "forward", "backward", "finish"]


def wrong_profiles(rank, world):
    ddp = make_ddp()
    for wrong, steps in ((ddp.module, 3), (ddp, 0)):
        with pytest.raises(ConfigError), gradsync.profile(wrong, steps=steps):
            raise AssertionError("not reached")
    with pytest.raises(ZeroDivisionError), gradsync.profile(ddp):
        train(ddp, 1, before_forward=lambda step: 1 // 0)
    train(ddp, 2)  # an exception leaves neither ranks waiting nor the recording on
    return ddp.report().passes[-1].is_exact


def test_a_profile_says_what_it_cannot_record_and_survives_exceptions(ranks):
    assert ranks(wrong_profiles) == [False, False]


def offsets(rank, world, shift_s):
    from gradsync.comm import clocks

    real = clocks.perf_counter_ns
    clocks.perf_counter_ns = lambda: real() + int(rank * shift_s * 1e9)
    try:
        return clock_offset(dist.new_group(backend="gloo"))
    finally:
        clocks.perf_counter_ns = real


def test_clocks_that_are_apart_are_found_to_be(ranks3):
    first, second, third = ranks3(offsets, 100.0)
    assert first == 0.0
    assert second == pytest.approx(-100.0, abs=0.05)
    assert third == pytest.approx(-200.0, abs=0.05)


def accumulation_and_eval(rank, world):
    ddp = make_ddp()
    train(ddp, 1)
    with ddp.no_sync():
        ddp(torch.randn(8, 32)).sum().backward()
    ddp.eval()
    with torch.no_grad():
        ddp(torch.randn(8, 32))
    ddp.train()
    train(ddp, 1)
    return [span.phase for span in ddp.report().passes[-1].spans]


def test_a_window_with_accumulation_has_all_its_parts(ranks):
    parts = ["optimizer", "data", "forward", "backward", "data", "forward", "backward", "finish"]
    assert ranks(accumulation_and_eval) == [parts, parts]


def one_rank_alone(rank, world):
    group = dist.new_group([rank], use_local_synchronization=True)
    with pytest.warns(UserWarning, match="size 1"):
        ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    ddp(torch.ones(1, 2)).sum().backward()
    with gradsync.profile(ddp) as profile:
        pass
    return profile.verdict


def test_one_rank_has_nothing_to_report(ranks):
    assert ranks(one_rank_alone)[0] == "one rank: there is nothing to communicate"


# ------------------------------------------------------------- replicas


def break_a_replica(rank, world, every, broken_step):
    ddp = make_ddp(check_replicas_every=every)

    def corrupt(step):
        if rank == 1 and step == broken_step:
            with torch.no_grad():
                ddp.module[2].weight[3, 3] += 1e-6

    with pytest.raises(ContractError) as caught:
        train(ddp, 20, before_forward=corrupt)
    failed_in = ddp.reducer.num_passes - 1
    assert all(p.grad is None for p in ddp.parameters())
    ddp.sync_parameters()
    train(ddp, 2 * every)
    ddp.verify_replicas()
    return str(caught.value), failed_in


@pytest.mark.parametrize(("every", "broken_step", "found_in"), [(1, 4, 4), (3, 7, 9)])
def test_a_replica_that_differs_is_named_on_all_ranks_in_the_same_step(ranks, every, broken_step, found_in):
    for rank, (message, failed_in) in enumerate(ranks(break_a_replica, every, broken_step)):
        assert failed_in == found_in
        assert f"rank {rank}: the replicas differ: '2.weight' has other values on rank(s) 1 than on rank 0" in message
        assert f"in pass {found_in}; they were still equal in pass {found_in - every}" in message


def replicas_that_may_differ(rank, world):
    def train_apart(**options):
        ddp = make_ddp(check_replicas_every=options.pop("every", None), **options)
        with torch.no_grad():
            ddp.module[0].bias += rank
        return ddp

    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    train(train_apart(every=0), 3)
    assert train_apart(init_sync=False).reducer.replica_check.every == 0
    assert make_ddp().reducer.replica_check.every == 100
    hooked = train_apart(every=1)
    hooked.register_comm_hook(None, allreduce_hook)
    train(hooked, 3)


def test_no_check_where_it_is_not_wanted(ranks):
    ranks(replicas_that_may_differ)


def wrong_interval(rank, world):
    with pytest.raises(ConfigError, match="check_replicas_every is a number of passes"):
        make_ddp(check_replicas_every=-1)
    with pytest.raises(ContractError, match="check_finite is True on rank 0 and False on rank 1"):
        make_ddp(check_finite=rank == 0)


def test_the_checks_must_be_asked_for_alike(ranks):
    ranks(wrong_interval)


def test_digests_see_every_single_bit_and_no_more():
    torch.manual_seed(0)
    tensors = [
        torch.randn(5, 7),
        torch.randn(6, 4).t(),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(9).bfloat16(),
        torch.zeros(0),
        torch.tensor(2.5),
        torch.randn(100)[1:92],
    ]
    before = digests(tensors)
    assert digests([t.clone() for t in tensors]) == before
    for position, tensor in enumerate(tensors):
        if tensor.numel():
            changed = [t.clone() for t in tensors]
            changed[position].view(-1)[-1:].mul_(1.5) if changed[position].is_contiguous() else changed[position].mul_(
                2
            )
            assert [a == b for a, b in zip(digests(changed), before, strict=True)] == [
                other != position for other in range(len(tensors))
            ]


# ------------------------------------------------------------- gradients that are not finite


def spoil_a_gradient(rank, world, value):
    ddp = make_ddp(check_finite=True, check_replicas_every=1)
    handles = []

    def spoil(step):
        if step == 3 and rank == 1:
            ruin = lambda grad: torch.full_like(grad, value)  # noqa: E731
            handles.append(ddp.module[1].weight.register_hook(ruin))
            handles.append(ddp.module[0].weight.register_hook(ruin))

    with pytest.raises(NonFiniteError) as caught:
        train(ddp, 6, before_forward=spoil)
    assert all(p.grad is None for p in ddp.parameters())
    for handle in handles:
        handle.remove()
    train(ddp, 3)  # the step is skipped, and training goes on
    assert all(torch.isfinite(p).all() for p in ddp.parameters())
    (number,) = [b.number for b in ddp.report().buckets for place in b.parameters if place.name == "1.weight"]
    return str(caught.value), number


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_origin_of_a_gradient_that_is_not_finite_is_named_before_it_is_averaged(ranks, value):
    for rank, (message, bucket) in enumerate(ranks(spoil_a_gradient, value)):
        assert message.startswith(f"rank {rank}: gradients are infinite or not a number in pass 3")
        # 1.weight comes before 0.weight in backward, and rank 0 is fine
        assert f"first in backward: rank 1: '1.weight' (bucket {bucket}). The" in message


def large_sums(rank, world):
    ddp = DistributedDataParallel(nn.Linear(4, 4, bias=False), check_finite=True)
    (ddp(torch.full((1, 4), 1e38)) * 1.0).sum().backward()
    return bool(torch.isfinite(ddp.module.weight.grad).all())


def test_large_gradients_are_finite_even_if_their_sum_is_not(ranks):
    assert ranks(large_sums) == [True, True]


# ------------------------------------------------------------- torch's own ways to look


def train_with_details(rank, world):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
        ddp = make_ddp(process_group=group)
        train(ddp, 4)
        ddp.verify_replicas()
        return ddp.report().verdict
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_torchs_debug_level_works_with_the_engine(ranks):
    assert all("waiting" in verdict for verdict in ranks(train_with_details))
