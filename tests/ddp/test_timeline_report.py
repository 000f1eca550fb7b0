"""What the numbers of passes mean: hidden and exposed time, the worst bucket, the rank that is late."""

import pytest

from gradsync.ddp.passes import BucketMap, BucketTimes, ParameterPlace, PassRecord, RankTimes, Span, median, rank_times
from gradsync.ddp.report import Report, find_straggler, milliseconds


def pass_record(number=5, waits=(0.0, 0.0019), is_exact=True, step_s=0.1):
    buckets = (
        BucketTimes(0, 0.01, 0.01, 0.012, waits[0]),
        BucketTimes(1, None, 0.016, 0.020, waits[1]),
    )
    return PassRecord(number, 3.0, step_s, is_exact, (Span("backward", 0.0, 0.0181),), buckets)


def bucket_map(number, *sizes):
    places = tuple(ParameterPlace(f"layer{number}.{i}", size, 0) for i, size in enumerate(sizes))
    return BucketMap(number, sum(sizes), "float32", places)


MAP = (bucket_map(0, 100, 200), bucket_map(1, 7, 5000, 6))


def report(passes, ranks=(), world_size=2):
    return Report(0, world_size, tuple(passes), MAP, (), tuple(ranks))


def test_the_sentence_names_what_was_hidden_the_bucket_and_its_largest_parameter():
    slow = [RankTimes(0, 0.001, 0.02, 0.03, 0.002), RankTimes(1, 0.013, 0.02, 0.03, 0.002)]
    found = report([pass_record(waits=(0.0012, 0.0019))], slow)
    assert found.verdict == (
        "2.9 ms of 6.0 ms communication hidden; the last bucket, 61 % of the exposed time, holds layer1.1; "
        "rank 1 is late by 12.0 ms in data"
    )
    assert found.straggler.rank == 1


def test_without_exact_times_it_says_what_is_known():
    assert report([pass_record(is_exact=False)]).verdict == "1.9 ms of a step of 100 ms were spent waiting"


def test_the_first_passes_count_only_if_there_are_no_others():
    early, late = pass_record(0, waits=(0.05, 0.05)), pass_record(2)
    assert report([early]).findings.exposed_s == pytest.approx(0.1)
    assert report([early, late]).findings.exposed_s == pytest.approx(0.0019)


def test_passes_of_another_plan_do_not_count():
    other = PassRecord(9, 0.0, 1.0, True, (), ())
    assert report([pass_record(), other]).findings.step_s == 0.1
    assert report([other]).verdict == "no pass was recorded"
    assert report([], world_size=1).verdict == "one rank: there is nothing to communicate"


@pytest.mark.parametrize(("phase", "seconds"), [("data", (0.05, 0.1, 0.1, 0.1)), ("backward", (0.01, 0.1, 0.14, 0.1))])
def test_the_straggler_is_named_with_its_phase(phase, seconds):
    others = [RankTimes(rank, 0.01, 0.1, 0.1, 0.1) for rank in (0, 1, 3)]
    found = find_straggler([*others, RankTimes(2, *seconds)], step_s=0.35)
    assert (found.rank, found.phase, found.delay_s) == (2, phase, pytest.approx(0.04))


def test_small_differences_are_not_worth_a_word():
    ranks = [RankTimes(0, 0.01, 0.1, 0.1, 0.1), RankTimes(1, 0.01, 0.12, 0.1, 0.1)]
    assert find_straggler(ranks, step_s=0.33) is None
    assert find_straggler([RankTimes(0, 0, 0, 0, 0), RankTimes(1, 0, 0.0003, 0, 0)], step_s=0.0005) is None
    assert find_straggler(ranks[:1], step_s=0.01) is None


def test_times_of_ranks_are_medians():
    told = [((1.0, 2.0, 3.0, 4.0), (0.0, 0.0, 0.0, 0.0)), ((9.0, 2.0, 3.0, 4.0),) * 2, ((1.5, 2.0, 3.0, 4.0),) * 2]
    first, second = rank_times(told)
    assert (first.data_s, first.optimizer_s, first.local_s) == (1.5, 4.0, 10.5)
    assert second.data_s == 1.5
    assert rank_times([]) == ()
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.0


def test_times_are_spelled_as_people_say_them():
    assert [milliseconds(s) for s in (0.00005, 0.0041, 0.12, 3)] == ["0.05 ms", "4.1 ms", "120 ms", "3,000 ms"]


def test_a_report_is_plain_numbers():
    facts = report([pass_record()]).as_json()
    assert facts["passes"][0]["hidden_s"] == pytest.approx(0.0041)
    assert facts["findings"]["worst_parameter"] is None
    assert facts["buckets"][1]["parameters"][1] == {"name": "layer1.1", "num_bytes": 5000, "offset_bytes": 0}


def test_of_a_gpu_it_says_what_is_not_known():
    buckets = (BucketTimes(0, 0.01, 0.01, None, None), BucketTimes(1, None, 0.016, None, None))
    record = PassRecord(5, 3.0, 0.1, False, (), buckets)
    found = report([record])
    assert found.verdict == "a step takes 100 ms; what a GPU waits for is known while profile() records"
    assert found.findings.worst_bucket is None
    assert found.as_json()["passes"][0]["exposed_s"] is None
