"""Killed at any moment, also while saving, and with no room on the disk: a valid checkpoint is always found."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kill_often import OPTIONS

from gradsync.train.checkpoint import CheckpointFolder, list_checkpoints, newest_intact
from training_jobs import Notebook, losses, options_for, train, write_text

NUM_KILLS = 20


def _run(config, file_size_limit=None):
    if file_size_limit is not None:
        # A write beyond the limit fails as on a full disk, if the signal for it is ignored.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_limit, file_size_limit))
    train(config)


def _start(*arguments):
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=arguments)
    process.start()
    return process


@pytest.fixture
def folder(tmp_path):
    write_text(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_killed_twenty_times_and_still_the_unbroken_run(folder):
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(here / "kill_often.py"), str(folder), str(NUM_KILLS)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    steps = json.loads(result.stdout)
    assert len(steps) == NUM_KILLS
    assert steps == sorted(set(steps)), "every start must have got further than the one before"
    killed = options_for(folder, resume=True, stop_after=3, **OPTIONS)
    train(killed)
    straight = options_for(folder, run=str(folder / "straight"), stop_after=steps[-1] + 3, **OPTIONS)
    train(straight)
    assert losses(killed) == losses(straight)
    assert not list((folder / "run" / "checkpoints").glob(".*"))


def test_without_room_the_run_fails_and_what_was_saved_before_stays(folder):
    config = options_for(folder, stop_after=3)
    train(config)
    process = _start(options_for(folder, resume=True), 2000)
    process.join()
    assert process.exitcode == 1
    assert newest_intact(Path(config.run) / "checkpoints", pytest.fail).step == 3
    assert train(options_for(folder, resume=True)).is_finished


def test_a_checkpoint_that_cannot_be_written_is_reported_and_the_next_one_is_tried(folder, monkeypatch):
    original, calls = CheckpointFolder._publish, []

    def publish(self, *arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        original(self, *arguments)

    monkeypatch.setattr(CheckpointFolder, "_publish", publish)
    view = Notebook()
    config = options_for(folder)
    assert train(config, view=view).is_finished
    warnings = [note for note in view.notes if note.startswith("warning")]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    assert newest_intact(Path(config.run) / "checkpoints", pytest.fail).step == 6


@pytest.mark.parametrize("is_async", [True, False])
def test_a_checkpoint_holds_the_state_of_its_step_while_training_goes_on(folder, is_async):
    config = options_for(folder, async_checkpoints=is_async, checkpoint_every=1, keep_checkpoints=9)
    train(config)
    reference = options_for(folder, run=str(folder / "reference"), stop_after=2)
    train(reference)
    (at_two,) = [c for c in list_checkpoints(Path(config.run) / "checkpoints") if c.step == 2]
    (expected,) = list_checkpoints(Path(reference.run) / "checkpoints")
    assert at_two.files["__0_0.distcp"]["sha256"] == expected.files["__0_0.distcp"]["sha256"]


def test_leftovers_do_not_pile_up(folder):
    config = options_for(folder, stop_after=1)
    train(config)
    checkpoints = Path(config.run) / "checkpoints"
    (checkpoints / ".unfinished-step-00000009").mkdir()
    train(options_for(folder, resume=True))
    assert not (checkpoints / ".unfinished-step-00000009").exists()
