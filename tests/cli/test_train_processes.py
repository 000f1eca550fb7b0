"""``gradsync train`` and ``sample`` as a user runs them, on two processes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from commands import (
    SMALL,
    TIMEOUT_S,
    environment,
    gradsync,
    rank_processes,
    running,
    session_members,
    wait_until,
)

from listening import addresses, beyond_loopback

pytestmark = [
    pytest.mark.timeout(600),  # several starts of a command, on a machine that may be busy
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them"),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"The {n}th line of {n * n} lines.\n" for n in range(400)))
    return tmp_path


def train_arguments(*more):
    return ["train", "--data", "text.txt", "--nproc", "2", *SMALL, *more]


def records(run: Path):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "tokens_per_s"} for line in lines]


def has_trained(run: Path):
    return lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0


def test_train_stop_resume_and_sample(folder):
    straight = gradsync(*train_arguments("--run", "straight", "--steps", "6"), cwd=folder)
    assert straight.returncode == 0, straight.stderr
    assert "finished step 6 of 6, validation loss" in straight.stdout
    assert "--- sample ---" in straight.stdout
    stopped = gradsync(*train_arguments("--run", "broken", "--steps", "6", "--stop-after", "4"), cwd=folder)
    assert stopped.returncode == 0, stopped.stderr
    assert "gradsync train --run broken --resume" in stopped.stdout
    resumed = gradsync("train", "--run", "broken", "--resume", "--nproc", "2", cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert records(folder / "broken") == records(folder / "straight")
    _check_refusals(folder)
    sampled = gradsync("sample", "broken", "--prompt", "The ", "--max-tokens", "5", cwd=folder)
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.startswith("The ")


def _check_refusals(folder):
    """A used folder is neither started in anew nor gone on with under other options; nothing in it changes."""
    before = {path: path.read_bytes() for path in (folder / "straight").rglob("*") if path.is_file()}
    again = gradsync(*train_arguments("--run", "straight", "--steps", "6"), cwd=folder)
    other = gradsync(*train_arguments("--run", "straight", "--steps", "6", "--resume", "--lr", "0.5"), cwd=folder)
    assert (again.returncode, other.returncode) == (2, 2)
    assert "is not empty" in again.stderr
    assert "--lr 0.002 -> 0.5" in other.stderr
    assert {path: path.read_bytes() for path in (folder / "straight").rglob("*") if path.is_file()} == before


def test_ctrl_c_once_finishes_the_step_and_saves(folder):
    run = folder / "run"
    with running(*train_arguments("--run", "run", "--steps", "1000000"), cwd=folder) as process:
        wait_until(has_trained(run), "the first step")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        wait_until(lambda: not session_members(process.pid), "every process has ended")
    last = records(run)[-1]["step"]
    assert f"stopped after step {last} of 1000000" in out
    assert (run / "checkpoints" / f"step-{last:08d}" / "manifest.json").exists()


def test_ctrl_c_twice_ends_at_once_and_leaves_nothing(folder, monkeypatch):
    (folder / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "temporary"))
    with running(*train_arguments("--run", "run", "--steps", "1000000"), cwd=folder) as process:
        wait_until(has_trained(folder / "run"), "the first step")
        # Stopped processes finish no step, so nothing but the second Ctrl-C can end this.
        for rank in rank_processes(process.pid):
            os.kill(rank, signal.SIGSTOP)
        os.kill(process.pid, signal.SIGINT)
        wait_until(lambda: "stopping after this step" in process.stderr.readline(), "the first one is answered")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
        wait_until(lambda: not session_members(process.pid), "every process has ended")
    assert [path.name for path in (folder / "temporary").glob("*") if "inductor" not in path.name] == []


def test_a_killed_launcher_leaves_no_process(folder):
    with running(*train_arguments("--run", "run", "--steps", "1000000"), cwd=folder) as process:
        wait_until(has_trained(folder / "run"), "the first step")
        process.kill()
        process.wait(timeout=60)
        wait_until(lambda: not session_members(process.pid), "every process has ended")


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_run_on_one_machine_listens_on_loopback_alone_and_keeps_its_files_to_itself(folder, backend):
    before = set(Path(tempfile.gettempdir()).glob("gradsync-*"))
    arguments = train_arguments("--run", "run", "--steps", "1000000", "--backend", backend)
    with running(*arguments, cwd=folder) as process:
        wait_until(has_trained(folder / "run"), "the first step")
        members = session_members(process.pid)
        assert addresses(members), "the test sees no socket at all"
        assert beyond_loopback(members) == set()
        control = [path for path in Path(tempfile.gettempdir()).glob("gradsync-*") if path not in before]
        assert control and all(path.stat().st_mode & 0o077 == 0 for path in control)


@pytest.mark.parametrize("place", [0, -1], ids=["the first rank", "the last rank"])
def test_sigterm_on_any_one_rank_saves_the_same_step_on_all(folder, place):
    run = folder / "run"
    with running(*train_arguments("--run", "run", "--steps", "1000000"), cwd=folder) as process:
        wait_until(has_trained(run), "the first step")
        os.kill(sorted(rank_processes(process.pid))[place], signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 143
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{records(run)[-1]['step']:08d}"


def test_a_killed_rank_is_named_and_the_command_fails(folder):
    with running(*train_arguments("--run", "run", "--steps", "1000000"), cwd=folder) as process:
        wait_until(has_trained(folder / "run"), "the first step")
        os.kill(rank_processes(process.pid)[-1], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert err.splitlines()[-1].startswith("gradsync train: error: rank ")
        assert "was killed by SIGKILL" in err.splitlines()[-1]
        wait_until(lambda: not session_members(process.pid), "every process has ended")


def test_a_stopped_rank_is_named_and_the_command_fails(folder):
    arguments = train_arguments("--run", "run", "--steps", "1000000", "--soft-limit", "2")
    with running(*arguments, cwd=folder) as process:
        wait_until(has_trained(folder / "run"), "the first step")
        os.kill(min(rank_processes(process.pid)), signal.SIGSTOP)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "the odd one out is rank 0: it does not answer" in err
        wait_until(lambda: not session_members(process.pid), "every process has ended")


def test_bad_text_is_one_line_and_leaves_nothing(folder):
    (folder / "text.txt").write_text("too short")
    result = gradsync(*train_arguments("--run", "run"), cwd=folder)
    assert result.returncode == 1
    assert [line for line in result.stderr.splitlines() if "error" in line] == [result.stderr.splitlines()[-1]]
    assert "is shorter than one step" in result.stderr.splitlines()[-1]
    assert not (folder / "run").exists()


def test_a_run_goes_on_when_nobody_reads_its_output_any_more(folder):
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "gradsync", *train_arguments("--run", "run", "--steps", "6", "--log-every", "1")]
    process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=writer, stderr=writer)
    os.close(writer)
    assert os.read(reader, 100).startswith(b"starting 2 processes")
    os.close(reader)
    assert process.wait(TIMEOUT_S) == 0
    assert [record["step"] for record in records(folder / "run")] == list(range(1, 7))


def test_a_second_process_does_not_go_on_with_a_run_under_way(folder):
    with running(*train_arguments("--run", "run", "--steps", "100000"), cwd=folder):
        wait_until(has_trained(folder / "run"), "the first step")
        second = gradsync(*train_arguments("--run", "run", "--steps", "100000", "--resume"), cwd=folder)
        assert second.returncode == 2
        assert "another process is training in run folder run" in second.stderr
