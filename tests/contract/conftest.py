"""``backend``, ``clock`` and ``store``: every contract test runs once per store it is about."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_idem.stores.base import Store
from tests.contract.backends import STORES, Backend, MemoryBackend
from tests.support.clock import ManualClock


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """An empty place of this test's own."""
    place = MemoryBackend("memory", "memory://")
    yield place
    place.close()


@pytest.fixture
def clock() -> ManualClock:
    """The time as ``store`` sees it."""
    return ManualClock()


@pytest.fixture
def store(backend: Backend, clock: ManualClock) -> Store:
    """A store on the backend that goes by ``clock``."""
    return backend.open(clock)


@pytest.fixture
def real_store(backend: Backend) -> Store:
    """A store on the backend that goes by its own clock."""
    return backend.open()
