"""What a worker is told when it starts, beyond its settings."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest
from celery import Celery, Task

from celery_idem import ConfigurationError, IdempotentTask, install, open_store
from celery_idem.app import NOTHING_ON, runtime_of
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


@pytest.mark.parametrize("entry", ["celery_idem:annotate", "celery_idem.optin:anotation", "celery_idem:install"])
def test_a_switch_that_is_misspelt_is_refused_where_celery_passes_over_it(entry: str) -> None:
    """Its commands swallow the AttributeError, and go on with an app that is finalized and has half of its tasks."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(idempotency_store="memory://", task_annotations=(entry,))
    with pytest.raises(ConfigurationError, match=f"task_annotations names '{entry}', .*write celery_idem:annotation"):
        runtime_of(app).check()


@pytest.mark.parametrize("entry", [SETTING, "celery_idem.annotation", "celery_idems:x", {"*": {"rate_limit": 5}}])
def test_other_annotations_are_left_alone(entry: Any) -> None:
    with closing(Shop()) as shop:
        shop.app.conf.task_annotations = entry
        assert "switches nothing on" not in told(shop)


def test_check_tells_what_a_worker_tells_where_nothing_is_on() -> None:
    with closing(Shop()) as shop:
        assert NOTHING_ON in told(shop)
        shop.task(name="pay")(pay)
        assert NOTHING_ON not in told(shop)


def test_tasks_that_a_whole_app_leaves_out_are_counted() -> None:
    with closing(Shop(task_annotations=[SETTING], idempotency_tasks={"refund": {"key": "o:{order_id}"}})) as shop:
        assert runtime_of(shop.app).left_out() == []
        shop.app.task(shared=False, name="refund", lazy=False)(refund)
        shop.app.task(shared=False, name="pay", lazy=False)(pay)
        assert runtime_of(shop.app).left_out() == ["pay"]
    with closing(Shop()) as shop:
        shop.app.task(shared=False, name="pay", lazy=False)(pay)
        assert runtime_of(shop.app).left_out() == []  # nobody said that it should be on


@pytest.mark.parametrize("url", [None, b"redis://localhost/0", 5])
def test_a_store_is_named_by_text(url: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"of type {type(url).__name__}: name a store by its URL"):
        open_store(url)


@pytest.mark.parametrize("settings", [{}, {"task_annotations": [SETTING]}])
def test_a_key_that_only_the_base_class_reads_is_told(settings: dict[str, Any]) -> None:
    with closing(Shop(**settings)) as shop:
        shop.app.task(shared=False, name="refund", key="order:{order_id}", lazy=False)(refund)
        assert "refund has key='order:{order_id}' without the base class: base=IdempotentTask, or" in told(shop)


def test_a_task_that_collects_its_messages_is_told() -> None:
    class Batches(Task):  # type: ignore[type-arg]
        abstract = True

        def Strategy(self, task: Any, app: Any, consumer: Any) -> Any:  # type: ignore[override]
            raise AssertionError("no worker here")

    with closing(Shop(task_annotations=[SETTING], idempotency_tasks={"left.*": False, "*": True})) as shop:
        for name in ("left.out", "shop.collect"):
            shop.app.task(shared=False, base=Batches, name=name, lazy=False)(pay)
        assert "shop.collect has a Strategy of its own: idempotency_tasks = {'shop.collect': False, " in told(shop)
        assert "left.out" not in told(shop)


def test_an_async_body_is_told_unless_something_runs_it() -> None:
    class Runs(IdempotentTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return asyncio.run(self.run(*args, **kwargs))

    async def wait() -> str:
        await asyncio.sleep(0)
        return "waited"

    with closing(Shop()) as shop:
        awaited = shop.app.task(shared=False, base=Runs, name="awaited", lazy=False)(wait)
        assert "async" not in told(shop)
        assert shop.deliver(shop.send(awaited)).value == "waited"
        shop.task(name="wait", autoretry_for=(OSError,))(wait)
        assert "wait has an async body: a plain function that calls asyncio.run(…)" in told(shop)


def pay() -> None:
    """A body."""


def refund(order_id: int) -> None:
    """Another."""
