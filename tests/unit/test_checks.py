"""What a worker is told when it starts, beyond its settings."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_idem.app import runtime_of


@pytest.mark.parametrize(
    ("broker", "options", "told"),
    [
        ("amqp://localhost", {}, True),
        ("amqp://localhost", {"confirm_publish": True}, False),
        ("redis://localhost", {}, False),
        ("memory://", {}, False),
    ],
)
def test_a_broker_that_confirms_no_publish_is_told(broker: str, options: Any, told: bool) -> None:
    app = Celery("shop", broker=broker, set_as_current=False)
    app.conf.update(idempotency_store="memory://", broker_transport_options=options)
    assert any("confirm_publish" in warning for warning in runtime_of(app).check()) is told
