"""The stack of a running thread is read without harm to it."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gradsync.comm.frames import frames_of

_RESTLESS = """
import sys, threading, time
from gradsync.comm.frames import frames_of


class Garbage:
    def __init__(self, depth):
        self.depth, self.itself = depth, self

    def __del__(self):
        work(2)


def numbers(depth):
    if depth:
        yield from numbers(depth - 1)
    for each in range(3):
        yield [each] * depth


def work(depth):
    if depth == 0:
        try:
            raise ValueError
        except ValueError as error:
            return len(error.args)
    if depth % 5 == 0:
        Garbage(depth)
    return sum(map(len, numbers(depth % 6))) + work(depth - 1)


def work_on():
    while time.monotonic() < until:
        work(30)
        list(numbers(8))
        list(map(lambda _: work(3), range(5)))


sys.setswitchinterval(1e-5)
until = time.monotonic() + 2
thread = threading.Thread(target=work_on)
thread.start()
seen = set()
while thread.is_alive():
    frames = frames_of(thread.ident)
    seen.update((frame.f_code.co_name, frame.f_lineno) for frame in frames)
names = {name for name, _ in seen}
assert names >= {"_bootstrap", "run", "work_on", "work", "numbers"}, names
"""
"""Looks incessantly at a thread whose garbage, when it is collected, gives other threads their turn."""


def test_a_thread_that_never_rests_survives_being_looked_at() -> None:
    """With ``f_back`` and the collector on, Python 3.11 crashes here within a fraction of a second."""
    ended = subprocess.run([sys.executable, "-c", _RESTLESS], capture_output=True, text=True)  # noqa: S603
    assert (ended.returncode, ended.stderr) == (0, "")


@contextmanager
def waiting_thread() -> Iterator[int]:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    assert thread.ident is not None
    try:
        yield thread.ident
    finally:
        gate.set()
        thread.join()


@pytest.mark.parametrize("is_collecting", [True, False])
def test_the_stack_comes_innermost_first_and_the_collector_stays_as_it_was(is_collecting: bool) -> None:
    was_collecting = gc.isenabled()
    (gc.enable if is_collecting else gc.disable)()
    try:
        with waiting_thread() as thread:
            frames = frames_of(thread)
        assert gc.isenabled() == is_collecting
    finally:
        (gc.enable if was_collecting else gc.disable)()
    names = [frame.f_code.co_name for frame in frames]
    assert names[-3:] == ["run", "_bootstrap_inner", "_bootstrap"]
    assert names[:2] == ["wait", "wait"]


def test_a_thread_that_has_ended_has_no_stack() -> None:
    with waiting_thread() as thread:
        pass
    assert frames_of(thread) == frames_of(None) == []
