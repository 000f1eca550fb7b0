"""Fixtures shared by all tests: pools of real ranks, started once for the whole session."""

from collections.abc import Iterator

import pytest
import torch

from rank_pool import RankPool

_RANK_FIXTURES = {"ranks", "ranks3", "ranks4"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _RANK_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("distributed")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


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
