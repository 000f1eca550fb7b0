"""Fixtures shared by all tests: pools of real ranks, started once for the whole session; and who runs what where.

[Note: Several processes] ``make test`` has pytest-xdist spread the test files over two processes, each with pools of
its own: most of the long tests wait (for a limit that is to pass, for processes to start and end). ``WORKERS=auto``
takes one more than there are cores. The files whose tests take long come first: the quick ones then fill what is left.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from rank_pool import RankPool

# A busy machine is no failure of the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A shell's background job ignores Ctrl-C, and so would every command that is started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_RANK_FIXTURES = {"ranks", "ranks3", "ranks4"}
_MOST_PROCESSES = 6


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """See [Note: Several processes]."""
    return min((os.cpu_count() or 1) + 1, _MOST_PROCESSES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _RANK_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("distributed")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
    if config.getoption("dist", "no") != "no":
        num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: num_slow[item.path], reverse=True)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Compute as the ranks do, so that results can be compared bit for bit."""
    torch.set_num_threads(1)


def _pool(world: int) -> Iterator[RankPool]:
    pool = RankPool(world)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def ranks3() -> Iterator[RankPool]:
    yield from _pool(3)


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    yield from _pool(4)
