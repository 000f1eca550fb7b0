"""Ranks that nobody launches: when one fails or is gone, at whatever moment, the others end and say so.

torch itself waits for the group's time-out at some of them, which is half an hour by default.
"""

import re
import sys
from pathlib import Path

import pytest
from harness import context
from plain import Task, start

from listening import free_port

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="stops processes as Linux does"),
]
_PATIENCE_S = 40.0


def run(folder: Path, where: str, kind: str, struck: int = 1, backend: str = "gloo", way: str = "env://") -> str:
    """Run two ranks; returns what the one that was not struck has said, which must have failed unless nobody has to."""
    port = free_port()
    way = way.format(port=port, folder=folder)
    outputs = [folder / f"output-{rank}.txt" for rank in range(2)]
    tasks = [Task(where, kind, struck, backend, way, output) for output in outputs]
    ranks = [context().Process(target=start, args=(task, rank, port)) for rank, task in enumerate(tasks)]
    for process in ranks:
        process.start()
    try:
        ranks[1 - struck].join(_PATIENCE_S)
        if kind in ("stop", "hang", "thread", "raise, clean up, go on"):
            ranks[struck].kill()
        ranks[struck].join(_PATIENCE_S)
        told = outputs[1 - struck].read_text()
        assert [process.is_alive() for process in ranks] == [False, False], told
        assert ranks[1 - struck].exitcode == (0 if kind == "late" else 1), told
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return told


@pytest.mark.parametrize(
    ("struck", "kind", "backend", "way"),
    [
        (1, "exit", "gloo", "env://"),
        (0, "raise", "gloo", "tcp://127.0.0.1:{port}"),
        (1, "kill", "shm", "file://{folder}/store"),
        pytest.param(1, "stop", "gloo", "tcp://127.0.0.1:{port}", marks=pytest.mark.stress),
        pytest.param(0, "exit", "shm", "env://", marks=pytest.mark.stress),
        pytest.param(1, "raise", "shm", "file://{folder}/store", marks=pytest.mark.stress),
    ],
)
def test_a_rank_that_is_lost_while_the_group_is_made(
    tmp_path: Path, struck: int, kind: str, backend: str, way: str
) -> None:
    told = run(tmp_path, "while the group is made", kind, struck, backend, way)
    assert f"rank {struck}" in told.strip().splitlines()[-1] or f"the odd one out is rank {struck}" in told, told
    if kind == "raise":
        assert f"RankFailedError: rank {struck} failed in the start of the process group" in told
        assert "ValueError: the injected failure" in told


@pytest.mark.parametrize(
    ("kind", "sign"),
    [
        ("raise", "RankFailedError: rank 1 failed in pass 0 (before the first pass): ValueError: the injected failure"),
        ("exit", "the odd one out is rank 1: it does not answer"),
        pytest.param("leave", "the odd one out is rank 1: it has left its loop and ended", marks=pytest.mark.stress),
    ],
)
def test_a_rank_that_is_lost_before_a_group_of_the_users(tmp_path: Path, kind: str, sign: str) -> None:
    told = run(tmp_path, "before a group of the user's", kind)
    assert sign in told and "this process is ended, as it waits in" in told, told
    assert 'in main: dist.new_group(backend="gloo")' in told


def test_a_rank_that_comes_late_to_a_group_of_the_users_is_waited_for(tmp_path: Path) -> None:
    assert "all have come" in run(tmp_path, "before a group of the user's", "late")


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize(
    ("kind", "sign"),
    [
        ("raise", "RankFailedError: rank 1 failed in pass 3 (after backward): ValueError: the injected failure"),
        ("raise, with a clean-up", "rank 1 failed in pass 3 (after backward): ValueError: the injected failure"),
        ("raise, clean up, go on", "destroyed .* process group after ValueError: the injected failure"),
        ("leave", "rank 1 ended before the others were done; give all ranks the same number of batches"),
        ("destroy", "rank 1 destroyed the process group before the others were done"),
    ],
)
def test_how_a_process_of_multiprocessings_ends_is_told(tmp_path: Path, backend: str, kind: str, sign: str) -> None:
    told = run(tmp_path, "in the loop", kind, backend=backend)
    assert "was interrupted" not in told and "WireClosedError" not in told, told  # how the wait was ended is no news
    assert re.search(sign.replace("(", r"\(").replace(")", r"\)"), told), told


def test_a_rank_without_batches_does_not_wait_for_ever_in_torchs_own_join(tmp_path: Path) -> None:
    told = run(tmp_path, "in torch's Join", "hang")
    assert "the odd one out is rank 1: it is busy elsewhere" in told, told
    assert "this process is ended, as it waits in" in told and "in main: with Join([model])" in told, told


def test_who_waits_for_a_thread_that_an_exception_has_ended_is_named_with_it(tmp_path: Path) -> None:
    told = run(tmp_path, "in the loop", "thread")
    assert "the odd one out is rank 1: a thread of it has ended with ValueError: the injected failure" in told, told
