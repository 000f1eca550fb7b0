"""Who stands still in a collective is seen from the stack and from what the groups have issued."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsync.comm import standstill
from gradsync.comm.ledger import Place
from gradsync.comm.other_wait import OtherWait
from gradsync.comm.standstill import Standstill, is_in_collective, stack_of
from gradsync.comm.watch import Watch

_SOURCE = """
def all_reduce(gate):
    gate.acquire()
"""


def function_in(path: Path) -> Any:
    """A function that waits for a lock, as if it stood in that file."""
    space: dict[str, Any] = {}
    exec(compile(_SOURCE, str(path), "exec"), space)  # noqa: S102
    return space["all_reduce"]


@contextmanager
def waiting_in(path: Path, function: Any = None) -> Iterator[int]:
    gate = threading.Lock()
    gate.acquire()
    function = function or function_in(path)
    thread = threading.Thread(target=function, args=(gate,))
    thread.start()
    while not (thread.ident and any(f" in {function.__name__}" in line for line in stack_of(thread.ident))):
        time.sleep(0.001)
    try:
        yield thread.ident
    finally:
        gate.release()
        thread.join()


TORCH = Path(torch.__file__).parent
COLLECTIVE = TORCH / "distributed" / "distributed_c10d.py"


@pytest.fixture
def issued(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts = [0]
    monkeypatch.setattr(standstill, "_issued", lambda: tuple(counts))
    return counts


def test_a_thread_in_the_same_call_of_a_collective_stands_still_in_it(issued: list[int]) -> None:
    with waiting_in(COLLECTIVE) as thread:
        still = Standstill(thread)
        still.look("step 1")
        assert still.collective == "", "it may have come there just now"
        first = still.since_s
        still.look("step 1")
        assert still.collective == "all_reduce"
        assert still.since_s == first
        assert is_in_collective(thread)


@pytest.mark.parametrize("progress", ["an operation", "a step"])
def test_whoever_issues_something_or_takes_a_step_gets_on(issued: list[int], progress: str) -> None:
    with waiting_in(COLLECTIVE) as thread:
        still = Standstill(thread)
        still.look("step 1")
        still.look("step 1")
        before = still.progressed_s
        issued[0] += progress == "an operation"
        still.look("step 2" if progress == "a step" else "step 1")
        assert still.collective == ""
        assert still.progressed_s > before


@pytest.mark.parametrize(
    "path", [Path("train.py"), TORCH / "distributed" / "tensor" / "_dispatch.py", TORCH / "nn" / "functional.py"]
)
def test_who_computes_or_waits_for_something_else_is_in_no_collective(issued: list[int], path: Path) -> None:
    with waiting_in(path) as thread:
        still = Standstill(thread)
        still.look("step 1")
        still.look("step 1")
        assert still.collective == ""
        assert not is_in_collective(thread)


def method_in(path: Path) -> Any:
    """The same, as a method of SyncBatchNorm's autograd function."""
    space: dict[str, Any] = {}
    source = "class SyncBatchNorm:\n" + _SOURCE.replace("\n", "\n    ").rstrip()
    exec(compile(source, str(path), "exec"), space)  # noqa: S102
    return space["SyncBatchNorm"].all_reduce


JOIN = TORCH / "distributed" / "algorithms" / "join.py"
FUNCTIONS = TORCH / "nn" / "modules" / "_functions.py"


@pytest.mark.parametrize(
    ("function", "waits", "is_of_training"),
    [
        (function_in(JOIN), True, True),
        (method_in(FUNCTIONS), True, True),
        (function_in(FUNCTIONS), False, False),
        (function_in(COLLECTIVE), True, False),
    ],
    ids=["Join", "SyncBatchNorm", "another function", "the user's"],
)
def test_torchs_own_collectives_of_training_are_told_from_the_users(
    issued: list[int], function: Any, waits: bool, is_of_training: bool
) -> None:
    with waiting_in(COLLECTIVE, function) as thread:
        still = Standstill(thread)
        still.look("step 1")
        still.look("step 1")
        assert bool(still.collective) is waits
        assert still.is_of_training is is_of_training


def test_who_compiles_is_seen_to(issued: list[int]) -> None:
    with waiting_in(Path(os.path.join(TORCH, "_dynamo", "convert_frame.py"))) as thread:
        still = Standstill(thread)
        still.look("step 1")
        assert still.is_compiling


def wait_for_number(gate: Any) -> float:
    return float(gate.acquire())


@pytest.mark.parametrize("has_gpu", [True, False])
def test_who_reads_a_number_of_a_gpu_waits_for_what_the_gpu_waits_for(
    issued: list[int], monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_gpu)
    with waiting_in(Path(__file__), wait_for_number) as thread:
        still = Standstill(thread)
        still.look("step 1")
        still.look("step 1")
        assert still.collective == ("a call that waits for the device" if has_gpu else "")


WAITS = Place(0, "", waited_s=9.0, collective="recv", still_s=9.0)


@pytest.mark.parametrize(
    ("other", "patience_s"),
    [
        (Place(0, "", still_s=9.0), -6.0),
        (Place(0, "", still_s=1.0), 2.0),
        (Place(0, "", excuse="compiling", still_s=9.0), 3.0),
    ],
)
def test_patience_with_whoever_gets_on_or_has_an_excuse(other: Place, patience_s: float) -> None:
    wait = OtherWait(0.0, 3.0, is_strict=True)
    assert Watch._patience_with({0: WAITS, 1: other}, wait) == patience_s
