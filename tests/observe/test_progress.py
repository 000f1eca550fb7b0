"""How a run is shown: plain lines, a live line, or nothing; clock and stream are given by hand."""

import io

import pytest

from gradsync.observe.progress import Course, Live, Pace, Plain, Silent, format_duration, open_view, smoothed
from gradsync.observe.records import StepRecord


class HandClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(step: int, loss: float = 2.5, **rest) -> StepRecord:
    return StepRecord(step, loss, 1e-3, 0.75, 12_345.6, **rest)


def show(view, clock, steps, **rest):
    view.begin(Course(0, 20, 1000))
    for step in steps:
        clock.now_s += 1.5
        view.step(record(step, **rest), 100 * 2**20)
    view.close()


def test_plain_lines_come_for_the_first_every_nth_and_the_last_step():
    stream, clock = io.StringIO(), HandClock()
    show(Plain(stream, every=8, clock=clock), clock, range(1, 21))
    lines = stream.getvalue().splitlines()
    assert [line.split("/")[0].split()[1] for line in lines] == ["1", "8", "16", "20"]
    assert lines[1] == (
        "step  8/20  loss 2.5000  smoothed 2.5000  lr 1.00e-03  norm 0.75  12,346 tokens/s  18s left  100 MiB"
    )


def test_a_validated_step_is_always_shown():
    stream, clock = io.StringIO(), HandClock()
    show(Plain(stream, every=100, clock=clock), clock, [1, 2], val_loss=1.25)
    assert stream.getvalue().count("val 1.2500") == 2


def test_the_live_line_ends_with_the_last_step_and_notes_scroll_by():
    stream, clock = Terminal(), HandClock()
    view = Live(stream, clock=clock)
    view.begin(Course(0, 20, 1000))
    for step in (1, 20):
        clock.now_s += 1.5
        view.step(record(step), 0)
    view.note("saved [somewhere]")
    view.close()
    assert "step 20/20  loss 2.5000" in stream.getvalue()
    assert "saved [somewhere]" in stream.getvalue()


def test_the_live_line_is_not_drawn_for_every_step():
    stream, clock = Terminal(), HandClock()
    view = Live(stream, clock=clock)
    view.begin(Course(0, 1000, 1000))
    start = len(stream.getvalue())
    for step in range(1, 100):
        clock.now_s += 0.01
        view.step(record(step), 0)
    assert stream.getvalue()[start:].count("step ") <= 6
    view.close()


def test_no_color_and_no_terminal_give_no_colours(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream, clock = Terminal(), HandClock()
    show(Live(stream, clock=clock), clock, [1])
    assert "\x1b[3" not in stream.getvalue()
    plain = io.StringIO()
    show(Plain(plain, 1, clock), clock, [1])
    assert "\x1b" not in plain.getvalue()


@pytest.mark.parametrize(
    ("mode", "stream", "environ", "kind"),
    [
        ("auto", io.StringIO(), {"TERM": "xterm"}, Plain),
        ("auto", Terminal(), {"TERM": "xterm"}, Live),
        ("auto", Terminal(), {"TERM": "dumb"}, Plain),
        ("live", io.StringIO(), {}, Live),
        ("plain", Terminal(), {"TERM": "xterm"}, Plain),
        ("none", Terminal(), {"TERM": "xterm"}, Silent),
    ],
)
def test_the_view_fits_the_stream(mode, stream, environ, kind):
    assert isinstance(open_view(mode, stream, 10, environ), kind)


def test_skipped_steps_do_not_spoil_the_smoothed_loss():
    pace = Pace(Course(0, 10, 1000), HandClock())
    pace.update(record(1, loss=2.0))
    pace.update(record(2, loss=float("nan"), skipped=True))
    assert pace.smoothed_loss == 2.0


def test_time_left_counts_what_happens_between_steps():
    clock = HandClock()
    pace = Pace(Course(4, 10, 1000), clock)
    clock.now_s = 3.0
    pace.update(record(5))
    assert pace.left_s == pytest.approx(15.0)


def take_steps(pace: Pace, clock: HandClock, speeds: list[float], pause_s: float = 0.0) -> None:
    for number, speed in enumerate(speeds, 1):
        clock.now_s += 1000 / speed + pause_s
        pace.update(StepRecord(number, 2.5, 1e-3, 0.75, speed))


def test_the_speed_that_is_shown_is_the_one_that_the_time_left_is_reckoned_with():
    clock = HandClock()
    pace = Pace(Course(0, 100, 1000), clock)
    take_steps(pace, clock, [50.0, 500.0, 500.0, 500.0, 250.0])
    assert 250 < pace.tokens_per_s < 500, "the latest step alone says little"
    assert pace.left_s == pytest.approx(95 * 1000 / pace.tokens_per_s)


def test_time_left_does_not_leap_with_an_evaluation():
    clock = HandClock()
    pace = Pace(Course(0, 1000, 1000), clock)
    take_steps(pace, clock, [500.0] * 99)
    clock.now_s += 100.0  # as long as 50 steps
    pace.update(StepRecord(100, 2.5, 1e-3, 0.75, 500.0))
    assert pace.tokens_per_s == pytest.approx(500.0)
    assert pace.left_s == pytest.approx(900 * (2.0 + 0.98))


def test_the_smoothed_loss_goes_on_where_it_was():
    losses = [5.0, 4.0, 3.5, 3.0]
    pace = Pace(Course(2, 10, 1000, smoothed(losses[:2])), HandClock())
    for number, loss in enumerate(losses[2:], 3):
        pace.update(record(number, loss))
    assert pace.smoothed_loss == smoothed(losses)
    assert smoothed([]) is None


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59.4, "59s"), (185, "3m05s"), (7620, "2h07m")])
def test_durations(seconds, text):
    assert format_duration(seconds) == text
