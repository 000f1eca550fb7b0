"""The recorder, driven by hand with a clock that the test advances."""

import pytest
from torch.futures import Future

from gradsync.ddp import timeline as timeline_module
from gradsync.ddp.passes import record_of
from gradsync.ddp.timeline import LOCAL_PHASES, Timeline

MS = 1_000_000


class Clock:
    """Starts at 1 ms, since a moment of 0 stands for one that was not seen."""

    def __init__(self):
        self.now = MS

    def __call__(self):
        return self.now

    def after(self, milliseconds):
        self.now += round(milliseconds * MS)


class Work:
    """A work that is complete when the test says so."""

    def __init__(self):
        self.future = Future()
        self.is_over = False

    def is_completed(self):
        return self.is_over

    def get_future(self):
        return self.future


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timeline_module, "perf_counter_ns", clock)
    return clock


def run_pass(timeline, clock, number=0, with_optimizer=True):
    """Optimizer 2 ms, data 3, forward 4 and loss 1, backward 10 with bucket 0 launched half-way, 5 of waiting."""
    first, last = Work(), Work()
    if with_optimizer:
        timeline.optimizer_begins()
        clock.after(2)
        timeline.optimizer_ends()
    clock.after(3)
    timeline.forward_begins()
    clock.after(4)
    timeline.forward_ends()
    clock.after(1)
    timeline.pass_begins(number, 2)
    clock.after(5)
    timeline.bucket_ready(0)
    timeline.bucket_launched(0, first)
    clock.after(4)
    first.is_over = True
    first.future.set_result(None)
    clock.after(1)
    timeline.local_ends()
    timeline.bucket_launched(1, last)
    timeline.wait_begins(0)
    clock.after(2)
    timeline.wait_ends(0)
    timeline.wait_begins(1)
    clock.after(3)
    last.is_over = True
    last.future.set_result(None)
    timeline.wait_ends(1)
    local = timeline.local_times()
    timeline.pass_ends((local, local))


def test_a_window_is_divided_into_phases(clock):
    timeline = Timeline()
    run_pass(timeline, clock, with_optimizer=False)
    run_pass(timeline, clock, number=1)
    first, second = (record_of(raw) for raw in timeline.passes)
    assert first.data_s == 0  # nobody knows since when the first batch was waited for
    times = [second.optimizer_s, second.data_s, second.forward_s, second.backward_s, second.total_s("finish")]
    assert times == pytest.approx([0.002, 0.003, 0.005, 0.010, 0.005])
    assert second.duration_s == pytest.approx(0.025)
    assert timeline.passes[-1].telemetry[0] == pytest.approx([0.003, 0.005, 0.010, 0.002])
    assert [second.total_s(phase) for phase in LOCAL_PHASES] == pytest.approx(timeline.passes[-1].telemetry[1])


def test_buckets_are_timed_and_waiting_is_what_was_exposed(clock):
    timeline = Timeline()
    run_pass(timeline, clock)
    run_pass(timeline, clock, number=1)
    early, last = record_of(timeline.passes[-1]).buckets
    # a window that began 10 ms before its backward
    assert (early.ready_s, early.launched_s) == pytest.approx((0.015, 0.015))
    assert last.ready_s is None
    assert early.done_s == pytest.approx(0.020), "without a profile it is looked at at the next launch"
    assert (early.wait_s, last.wait_s) == pytest.approx((0.002, 0.003))
    record = record_of(timeline.passes[-1])
    assert record.exposed_s == pytest.approx(0.005)
    assert record.communication_s is None
    assert record.hidden_s is None


def test_recording_knows_when_a_collective_was_done(clock):
    timeline = Timeline()
    timeline.record(2)
    for number in range(3):
        run_pass(timeline, clock, number)
    assert [raw.number for raw in timeline.recorded] == [0, 1]
    assert [raw.is_exact for raw in timeline.passes] == [True, True, False]
    record = record_of(timeline.recorded[1])
    assert record.buckets[0].done_s == pytest.approx(0.019)
    # 15 to 19, and 20 to 25
    assert record.communication_s == pytest.approx(0.009)
    assert record.hidden_s == pytest.approx(0.004)
    timeline.record(0)
    assert len(timeline.recorded) == 2


def test_backwards_without_synchronisation_belong_to_the_window(clock):
    timeline = Timeline()
    run_pass(timeline, clock)
    clock.after(1)
    timeline.forward_begins()
    clock.after(2)
    timeline.forward_ends()
    for _ in range(3):
        timeline.gradient_unsynced()
        clock.after(2)
    run_pass(timeline, clock, number=1, with_optimizer=False)
    record = record_of(timeline.passes[-1])
    # the last unsynchronised gradient came 4 ms after the first; what follows is waiting for the next batch
    assert record.backward_s == pytest.approx(0.004 + 0.010)
    assert record.data_s == pytest.approx(0.001 + 0.002 + 0.003)
    assert record.forward_s == pytest.approx(0.002 + 0.005)


def test_a_pass_that_failed_leaves_nothing_behind(clock):
    timeline = Timeline()
    timeline.forward_begins()
    timeline.pass_begins(0, 2)
    timeline.pass_is_over()
    clock.after(100)
    run_pass(timeline, clock, number=1)
    (record,) = (record_of(raw) for raw in timeline.passes)
    assert record.backward_s == pytest.approx(0.010)
    assert record.number == 1


def test_only_the_last_passes_are_kept(clock):
    timeline = Timeline()
    for number in range(100):
        run_pass(timeline, clock, number)
    assert [raw.number for raw in timeline.passes] == list(range(68, 100))


class Event:
    """Stands for a CUDA event: knows when it was recorded by the test's clock."""

    clock: Clock

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = self.clock.now

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return (other.at - self.at) / MS


def test_on_a_gpu_events_tell_what_was_waited_for_and_only_while_recording(clock, monkeypatch):
    monkeypatch.setattr("torch.cuda.Event", Event)
    Event.clock = clock
    timeline = Timeline(is_on_host=False)
    timeline.record(1)
    run_pass(timeline, clock)
    run_pass(timeline, clock, number=1)
    recorded, other = (record_of(raw, is_on_host=False) for raw in timeline.passes)
    assert [bucket.wait_s for bucket in recorded.buckets] == pytest.approx([0.002, 0.003])
    assert recorded.exposed_s == pytest.approx(0.005)
    assert recorded.communication_s is None
    assert other.exposed_s is None
    assert [bucket.done_s for bucket in (*recorded.buckets, *other.buckets)] == [None] * 4
