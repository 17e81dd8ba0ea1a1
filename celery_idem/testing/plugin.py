"""The fixtures. ``pytest_plugins = ["celery_idem.testing"]`` loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_idem.testing.idem import Idem
from celery_idem.testing.worker import Worker


@pytest.fixture
def idempotency_app(request: pytest.FixtureRequest) -> Celery:
    """The app under test; define this fixture yourself, or have ``celery_app`` of ``celery.contrib.pytest``."""
    try:
        app: Celery = request.getfixturevalue("celery_app")
    except pytest.FixtureLookupError:
        raise pytest.UsageError("define a fixture idempotency_app that returns your Celery app") from None
    return app


@pytest.fixture
def idempotency_settings() -> dict[str, Any]:
    """Settings laid over the app's own for a test; define this fixture yourself where you need some."""
    return {}


@pytest.fixture
def idem(idempotency_app: Celery, idempotency_settings: dict[str, Any]) -> Iterator[Idem]:
    """The app's deliveries in the hands of the test, in memory; everything is put back after it."""
    with Idem(idempotency_app, **idempotency_settings) as started:
        yield started


@pytest.fixture
def idem_worker() -> Iterator[Callable[..., Worker]]:
    """Start real workers, which end with the test; it takes what ``Worker`` takes."""
    started: list[Worker] = []

    def start(app: str, **options: Any) -> Worker:
        worker = Worker(app, **options)
        started.append(worker)
        return worker.start()

    yield start
    for worker in started:
        worker.__exit__()
