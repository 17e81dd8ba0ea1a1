"""What a worker is told when it starts, beyond its settings."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from celery import Celery

from celery_idem import install
from celery_idem.app import runtime_of
from celery_idem.optin import SETTING
from tests.support.delivery import Shop


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


def told(shop: Shop) -> str:
    return "\n".join(runtime_of(shop.app).check())


def test_patterns_without_the_switch_are_told() -> None:
    with closing(Shop(idempotency_tasks=["pay"])) as shop:
        shop.task(name="pay")(pay)
        assert "task_annotations does not name celery_idem:annotation" in told(shop)
        shop.app.conf.task_annotations = [SETTING]
        install(shop.app)
        assert "does not name" not in told(shop)


def test_tasks_that_are_acked_before_they_run_are_told_where_a_setting_switched_them_on() -> None:
    with closing(Shop(task_annotations=[SETTING])) as shop:
        shop.task(name="ours", acks_late=False)(pay)
        shop.app.task(shared=False, name="late", acks_late=True, lazy=False)(pay)
        assert "acked before" not in told(shop)
        shop.app.task(shared=False, name="early", lazy=False)(pay)
        assert "early is acked before it runs, so a crash loses it: set task_acks_late" in told(shop)


def pay() -> None:
    """A body."""
