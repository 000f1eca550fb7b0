"""Wrong usage of a command whose processes a launcher has started: exit code 2 of each, and one message."""

import signal
import socket
import subprocess
import sys

import pytest
from commands import SMALL, TIMEOUT_S, environment

from gradsync.cli import speaker
from gradsync.errors import BackendError, ConfigError
from listening import free_port

_TRAIN = ["train", "--data", "text.txt", "--device", "cpu", *SMALL]


def _as_ranks(folder, arguments, ends_others=True):
    """Start two ranks as torchrun does, and end the second as torchrun does, and srun does not, after the first."""
    (folder / "text.txt").write_text("".join(f"The {n}th line of {n * n} lines.\n" for n in range(400)))
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "gradsync", *arguments],
            cwd=folder,
            env={**environment(), **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [ranks[0].communicate(timeout=TIMEOUT_S)]
        if ends_others:
            ranks[1].send_signal(signal.SIGTERM)
        told.append(ranks[1].communicate(timeout=TIMEOUT_S))
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, out, err) for rank, (out, err) in zip(ranks, told, strict=True)]


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--tp", "3"], "needs a multiple of 3 processes"), (["--stepz", "3"], "did you mean --steps?")],
)
def test_options_that_cannot_work_are_told_by_the_first_rank(tmp_path, more, message):
    first, second = _as_ranks(tmp_path, [*_TRAIN, *more])
    assert first[0] == 2 and first[2].startswith("gradsync train: error: ") and message in first[2]
    assert first[2].count("\n") == 1 and first[1] == ""
    assert second[1:] == ("", "") and second[0] in (2, -signal.SIGTERM)  # it may not have got to Python yet


@pytest.mark.distributed
@pytest.mark.parametrize("ends_others", [True, False])
def test_what_the_first_rank_finds_when_all_have_met_is_told_once(tmp_path, ends_others):
    """Nor is torch heard on the store that the first rank takes along."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    first, second = _as_ranks(tmp_path, [*_TRAIN, "--run", "run"], ends_others)
    assert [first[0], second[0]] == [2, 2]
    assert [line for line in first[2].splitlines() if "error" in line] == [
        "gradsync train: error: run folder run is not empty; continue the run in it with --resume, or give another "
        "folder with --run"
    ]
    assert second[1:] == ("", "")


@pytest.mark.parametrize(
    ("rank", "local_rank", "told"),
    [(0, 0, "no"), (1, 1, None), (2, 0, f"rank 2 on host {socket.gethostname()}: no"), (3, 1, None)],
)
def test_one_process_of_a_host_tells(monkeypatch, rank, local_rank, told):
    place = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**place, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": 1234}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("gradsync.comm.launchers._adopted", None)
    assert speaker.told_here(ConfigError("no")) == told
    assert speaker.told_here(BackendError("lost")).endswith("lost")
