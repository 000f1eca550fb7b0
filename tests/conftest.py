"""Fixtures shared by all tests: pools of real ranks, started once for the whole session."""

from collections.abc import Iterator

import pytest

from rank_pool import RankPool

_RANK_FIXTURES = {"ranks", "ranks3", "ranks4"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _RANK_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("distributed")


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
