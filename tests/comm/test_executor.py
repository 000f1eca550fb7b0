"""The executor: operations run one at a time, in order, whoever runs them."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from gradsync.comm.executor import Executor, Work
from gradsync.errors import BackendError

PATIENCE_S = 60.0


class Scripted:
    """An operation that says when it runs."""

    def __init__(
        self, name: str, log: list[str], can_start: bool = False, run: Callable[[], None] = lambda: None
    ) -> None:
        self.name = name
        self._log = log
        self._can_start = can_start
        self._run = run

    def start(self) -> bool:
        if self._can_start:
            self._log.append(f"start {self.name}")
        return self._can_start

    def finish(self) -> None:
        self._run()
        self._log.append(self.name)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def executor() -> Any:
    result = Executor("test")
    yield result
    result.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "test"]


def submit(executor: Executor, operation: Scripted, is_awaited: bool = False) -> Work:
    return executor.submit(lambda: operation, operation.name, None, is_awaited)


def num_threads() -> int:
    return len([thread for thread in threading.enumerate() if thread.name == "test"])


def test_order_is_that_of_issue(executor: Executor, log: list[str]) -> None:
    names = [str(index) for index in range(50)]
    works = [submit(executor, Scripted(name, log)) for name in names]
    for work in reversed(works):
        work.wait()
    assert log == names


def test_what_can_start_needs_no_thread(executor: Executor, log: list[str]) -> None:
    works = [submit(executor, Scripted(name, log, can_start=True)) for name in "abc"]
    assert log == ["start a", "start b", "start c"]
    works[1].wait()
    assert log[3:] == ["a", "b"] and not works[2].is_finished and num_threads() == 0
    works[2].wait()


def test_nothing_starts_before_what_could_not_start(executor: Executor, log: list[str]) -> None:
    gate = threading.Event()
    first = submit(executor, Scripted("a", log, run=lambda: _await(gate)))
    second = submit(executor, Scripted("b", log, can_start=True))
    assert log == []
    gate.set()
    second.wait()
    assert first.is_finished and log == ["a", "b"]
    third = submit(executor, Scripted("c", log, can_start=True))
    assert log[2:] == ["start c"]
    third.wait()


def _await(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


def test_who_waits_runs_it_without_a_thread(executor: Executor, log: list[str]) -> None:
    seen: list[threading.Thread] = []
    operation = Scripted("a", log, run=lambda: seen.append(threading.current_thread()))
    submit(executor, operation, is_awaited=True).wait()
    assert seen == [threading.current_thread()] and num_threads() == 0


def test_unawaited_work_is_done_by_one_thread(executor: Executor, log: list[str]) -> None:
    for round_number in range(3):
        works = [submit(executor, Scripted(f"{round_number}{index}", log)) for index in range(20)]
        end = time.monotonic() + PATIENCE_S
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < end
            time.sleep(0.001)
    assert log == sorted(log) or len(log) == 60
    assert num_threads() == 1


def test_a_callback_may_issue_and_wait(executor: Executor, log: list[str]) -> None:
    def again(future: Any) -> str:
        inner = submit(executor, Scripted("inner", log))
        outer = inner.get_future().then(lambda _: submit(executor, Scripted("innermost", log)).get_future().wait())
        return f"{future.value()} {outer.wait()}"

    work = submit(executor, Scripted("outer", log))
    assert work.get_future().then(again).wait() == "outer innermost"
    assert log == ["outer", "inner", "innermost"]


def test_errors_reach_whoever_asks(executor: Executor, log: list[str]) -> None:
    def fail() -> None:
        raise BackendError("as planned")

    work = submit(executor, Scripted("a", log, run=fail))
    future = work.get_future()
    for _ in range(2):
        with pytest.raises(BackendError, match="as planned"):
            work.wait()
    with pytest.raises(RuntimeError, match="as planned"):
        future.wait()
    assert isinstance(work.exception(), BackendError) and not work.is_success() and work.is_completed()
    after = submit(executor, Scripted("b", log))
    assert after.wait() and after.is_success()


def test_threads_that_wait_for_different_works(executor: Executor, log: list[str]) -> None:
    for _ in range(20):
        works = [submit(executor, Scripted(str(index), log), is_awaited=True) for index in range(6)]
        threads = [threading.Thread(target=work.wait) for work in works]
        for thread in reversed(threads):
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert log == [str(index) for index in range(6)] * 20


def test_source_rank_is_for_messages(executor: Executor, log: list[str]) -> None:
    work = submit(executor, Scripted("a", log))
    with pytest.raises(BackendError, match="no source rank"):
        work.source_rank()
    work.synchronize()
