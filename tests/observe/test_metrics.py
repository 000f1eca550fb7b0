"""Step records kept: JSON lines that a kill cannot spoil, TensorBoard events where they can be had."""

import errno
import json
import sys
from types import SimpleNamespace

import pytest

from gradsync.errors import MissingExtraError
from gradsync.observe.memory import resident_bytes
from gradsync.observe.metrics import (
    Forgiving,
    JsonLines,
    TensorBoard,
    forget_after,
    losses_of,
    open_sinks,
    read_metrics,
)
from gradsync.observe.records import StepRecord


def write(path, steps, **rest):
    lines = JsonLines(path)
    for step in steps:
        lines.write(StepRecord(step, 1.5, 0.1, 2.0, 10.0, **rest))
    lines.close()


def test_one_object_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1])
    write(path, [2], val_loss=1.25)
    first, second = read_metrics(path)
    assert first == {"step": 1, "loss": 1.5, "lr": 0.1, "grad_norm": 2.0, "tokens_per_s": 10.0}
    assert second == {**first, "step": 2, "val_loss": 1.25}


def test_every_line_is_json_even_if_a_loss_is_not_a_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write(StepRecord(1, float("nan"), 0.1, float("inf"), 10.0, skipped=True))
    lines.close()
    line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (line["loss"], line["grad_norm"], line["skipped"]) == (None, None, True)


def test_a_line_is_written_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write(StepRecord(1, 1.5, 0.1, 2.0, 10.0))
    assert [record["step"] for record in read_metrics(path)] == [1]
    lines.close()


def test_steps_taken_again_are_forgotten_and_half_a_line_is_no_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6))
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    forget_after(path, 3)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


def test_losses_are_those_of_the_steps_that_were_taken(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1])
    write(path, [2], skipped=True)
    path.write_text(path.read_text() + '{"step": 3, "loss": null}\n{"step": 4, "loss": 2.5}\n')
    assert list(losses_of(read_metrics(path))) == [1.5, 2.5]


def test_nothing_to_forget(tmp_path):
    forget_after(tmp_path / "metrics.jsonl", 3)
    assert not list(read_metrics(tmp_path / "metrics.jsonl"))


def test_tensorboard_events_are_written_where_it_is_installed(tmp_path):
    pytest.importorskip("tensorboard")
    sinks = open_sinks(tmp_path, tensorboard=True, wandb=None, config={})
    assert [type(sink) for sink in sinks] == [JsonLines, TensorBoard]
    for sink in sinks:
        sink.write(StepRecord(1, 1.5, 0.1, 2.0, 10.0))
        sink.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"tokens_per_s" in events.read_bytes()


def test_a_tensorboard_that_is_broken_is_told_of_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    sink = TensorBoard(tmp_path / "tensorboard")
    with pytest.raises(MissingExtraError, match="tensorboard is installed but cannot be used"):
        sink.write(StepRecord(1, 1.5, 0.1, 2.0, 10.0))
    sink.write(StepRecord(2, 1.5, 0.1, 2.0, 10.0))
    sink.close()


def test_weights_and_biases_get_every_number_under_the_name_of_the_run(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(log=lambda numbers, step: calls.append((step, numbers)), finish=lambda: calls.append("end"))
    wandb = SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for sink in open_sinks(tmp_path, tensorboard=False, wandb="project", config={"lr": 0.1}):
        sink.write(StepRecord(3, 1.5, 0.1, 2.0, 10.0))
        sink.close()
    options, logged, end = calls
    assert options["project"] == "project" and options["id"] == tmp_path.name and options["config"] == {"lr": 0.1}
    assert logged == (3, {"loss": 1.5, "lr": 0.1, "grad_norm": 2.0, "tokens_per_s": 10.0})
    assert end == "end"


def test_without_wandb_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"gradsync\[wandb\]"):
        open_sinks(tmp_path, tensorboard=False, wandb="project", config={})


def test_tensorboard_can_be_left_out(tmp_path):
    (only,) = open_sinks(tmp_path, tensorboard=False, wandb=None, config={})
    only.close()
    assert isinstance(only, JsonLines)


def test_memory_is_a_plausible_number():
    assert 2**20 < resident_bytes() < 2**40


class FillingUp:
    """A file on a disk with little room."""

    def __init__(self, file, room):
        self._file, self.room = file, room

    def write(self, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(data[: self.room])
        self.room -= written
        return written

    def close(self):
        self._file.close()


def test_a_line_that_a_full_disk_cut_short_spoils_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines._file = disk = FillingUp(lines._file, room=120)
    lines.write(StepRecord(1, 1.5, 0.1, 2.0, 10.0))
    for step in (2, 3):
        with pytest.raises(OSError, match="No space left"):
            lines.write(StepRecord(step, 1.5, 0.1, 2.0, 10.0))
    disk.room = 10_000
    lines.write(StepRecord(4, 1.5, 0.1, 2.0, 10.0))
    lines.close()
    assert [record["step"] for record in read_metrics(path)] == [1, 4]
    forget_after(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]


def test_a_failing_sink_is_told_of_when_it_begins_and_when_it_ends():
    class Sometimes:
        def write(self, record):
            if record.step in (2, 3, 4, 6):
                raise OSError("no room")

        def close(self):
            raise OSError("no room")

    told = []
    sink = Forgiving(Sometimes(), told.append)
    for step in range(1, 7):
        sink.write(StepRecord(step, 1.5, 0.1, 2.0, 10.0))
    sink.close()
    assert told == [
        "warning: metrics cannot be written, they are missing from step 2 on: no room",
        "metrics of steps 2 to 4 are missing, later ones are written",
        "warning: metrics cannot be written, they are missing from step 6 on: no room",
        "warning: the last metrics could not be written: no room",
    ]
