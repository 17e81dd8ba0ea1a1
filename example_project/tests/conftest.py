"""The shop's tests need no server: ``pytest example_project/tests``."""

from __future__ import annotations

from pathlib import Path

import pytest
from celery import Celery

from example_project.app import app

pytest_plugins = ["celery_idem.testing"]


@pytest.fixture
def idempotency_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Celery:
    """The shop, with a ledger of the test's own."""
    monkeypatch.setenv("SHOP_DIR", str(tmp_path))
    return app
