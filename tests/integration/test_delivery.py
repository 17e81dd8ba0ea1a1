"""Real workers on real brokers: what the broker gives twice has its effect once, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

from celery_idem import DeliveriesExhausted, FingerprintMismatch, OutcomeUnknown
from celery_idem.stores.base import open_store
from tests.integration.shop import Shop, overlapping
from tests.support.chaos_proxy import ChaosProxy
from tests.support.workers import wait_until

pytestmark = [pytest.mark.redis, pytest.mark.postgres, pytest.mark.rabbitmq]
PAIRS = ["redis+redis", "rabbitmq+postgres"]


@pytest.fixture(params=PAIRS)
def places(request: Any) -> tuple[str, str]:
    """A broker and a store of this test's own: Redis for both, or RabbitMQ and PostgreSQL."""
    if request.param == "redis+redis":
        server = request.getfixturevalue("redis_server")
        return server.new_database(), server.new_database()
    return request.getfixturevalue("amqp_url"), prepared(request.getfixturevalue("postgres_url"))


def prepared(url: str) -> str:
    store = open_store(url, timeout=30)
    store.create_schema()
    store.close()
    return url


@pytest.fixture
def shop(places: tuple[str, str]) -> Iterator[Shop]:
    with Shop(*places) as made:
        yield made


def replayed(shop: Shop, times: int, timeout: float = 30) -> None:
    wait_until(lambda: shop.events().count("REPLAYED") >= times, timeout, f"{times} replays, not {shop.events()}")


# --- the same message again -----------------------------------------------------------------------


def test_one_message_published_three_times_runs_once(shop: Shop) -> None:
    with shop.tasks.worker(concurrency=2):
        results = [shop.work.apply_async((0.2, "paid"), task_id="M") for _ in range(3)]
        assert [r.get(timeout=30) for r in results] == ["paid"] * 3
        replayed(shop, 2)
    assert shop.starts() == 1


def test_two_messages_for_one_order_run_once_and_get_one_value(shop: Shop) -> None:
    with shop.tasks.worker(concurrency=2):
        first, second = shop.charge.delay(1, 50), shop.charge.delay(1, 50)
        assert first.get(timeout=30) == second.get(timeout=30) == {"order": 1, "amount": 50}
    assert shop.starts() == 1


def test_another_amount_for_the_same_order_fails_and_charges_nothing(shop: Shop) -> None:
    with shop.tasks.worker(concurrency=1):
        assert shop.charge.delay(1, 50).get(timeout=30)["amount"] == 50
        with pytest.raises(FingerprintMismatch, match="amount"):
            shop.charge.delay(1, 80).get(timeout=30)
    assert shop.starts() == 1


def test_a_copy_of_a_failed_message_does_not_run_after_the_errbacks(shop: Shop) -> None:
    with shop.tasks.worker(concurrency=1):
        for _ in range(2):
            with pytest.raises(ValueError, match="declined"):
                shop.fail.apply_async(task_id="M").get(timeout=30)
        wait_until(lambda: "OVER" in shop.events(), 20, "the copy to be dropped")
        assert shop.fail.AsyncResult("M").state == "FAILURE"
    assert shop.starts() == 1


# --- processes that die ---------------------------------------------------------------------------


@pytest.mark.crash
def test_a_child_killed_in_its_body_runs_again_at_once_and_says_so(shop: Shop) -> None:
    with shop.tasks.worker(concurrency=2):
        assert shop.die_once.delay("paid").get(timeout=30) == "paid"
    first, second = shop.runs("start")
    assert (first.attempt, second.attempt) == (1, 2)
    assert second.fence > first.fence
    assert second.at - first.at < 30, "a dead child must not cost a lease"
    assert shop.events() == ["NEW", "LEASE_RECLAIMED"]


@pytest.mark.crash
def test_a_child_killed_in_its_body_fails_where_unknown_must_fail(shop: Shop) -> None:
    with shop.tasks.worker(concurrency=1), pytest.raises(OutcomeUnknown, match="forget"):
        shop.die_and_tell.delay().get(timeout=30)
    assert shop.starts() == 1


@pytest.mark.crash
def test_a_task_that_always_kills_its_child_is_exhausted(shop: Shop) -> None:
    with shop.tasks.worker(concurrency=1), pytest.raises(DeliveriesExhausted, match="2 runs"):
        shop.die_always.delay().get(timeout=60)
    assert [run.attempt for run in shop.runs("start")] == [1, 2]


@pytest.mark.crash
def test_a_worker_killed_in_the_body_is_taken_over_by_another(places: tuple[str, str]) -> None:
    """Redis gives the message back only after its visibility timeout, and looks when a worker starts."""
    with Shop(*places, transport_options={"visibility_timeout": 1}) as shop:
        with shop.tasks.worker(concurrency=1) as worker:
            result = shop.wait_for_go.apply_async(("go",), task_id="M")
            wait_until(lambda: shop.starts() == 1, 20, "the first body")
            worker.kill()
        shop.touch("go")
        restore(shop)
        with shop.tasks.worker(concurrency=1):
            assert result.get(timeout=40) == "went"
        assert shop.events() == ["NEW", "LEASE_RECLAIMED"]
        assert shop.starts() == 2


@pytest.mark.crash
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # kombu's SQLAlchemy transport
@pytest.mark.parametrize("broker", ["filesystem", "sqlite"])
def test_a_worker_killed_on_a_broker_that_forgets_what_was_taken_loses_its_message(broker: str, tmp_path: Path) -> None:
    """Not covered: such a broker has no acks, so nothing gives the message to another worker."""
    url = "filesystem://" if broker == "filesystem" else f"sqla+sqlite:///{tmp_path}/broker.db"
    with Shop(url, prepared(f"sqlite:///{tmp_path}/claims.db")) as shop:
        with shop.tasks.worker(concurrency=1) as worker:
            shop.wait_for_go.apply_async(("go",), task_id="M")
            wait_until(lambda: shop.starts() == 1, 20, "the first body")
            worker.kill()
        shop.touch("go")
        with shop.tasks.worker(concurrency=1):
            assert shop.work.apply_async((0, "later"), task_id="N").get(timeout=30) == "later"
        assert [run.id for run in shop.runs("start")] == ["M", "N"]
        with shop.app.connection_for_read() as connection, pytest.raises(Empty):  # older kombus' size counts taken ones
            connection.default_channel._get(shop.tasks.queue)


@pytest.mark.crash
def test_a_task_that_is_acked_before_it_runs_is_lost_with_its_worker(redis_server: Any) -> None:
    """Not covered: at most once, for Celery took the message off the broker before the body began."""
    places = redis_server.new_database(), redis_server.new_database()
    with Shop(*places, transport_options={"visibility_timeout": 1}) as shop:
        with shop.tasks.worker(concurrency=1) as worker:
            shop.early.apply_async(("go",), task_id="M")
            wait_until(lambda: shop.starts() == 1, 20, "the first body")
            worker.kill()
        shop.touch("go")
        restore(shop)
        with shop.tasks.worker(concurrency=1):
            assert shop.work.apply_async((0, "later"), task_id="N").get(timeout=30) == "later"
        assert [run.id for run in shop.runs("start")] == ["M", "N"]


def restore(shop: Shop) -> None:
    """Have a Redis broker give back what no live worker acked, as its own sweep does every 100 s."""
    if not shop.tasks.broker.startswith("redis"):
        return

    def visible() -> bool:
        with shop.app.connection_for_read() as connection:
            connection.default_channel.qos.restore_visible(interval=1)
            client = connection.default_channel.client
            return int(client.hlen("unacked")) == 0

    wait_until(visible, 20, "the broker to give the message back")


def test_a_visibility_timeout_shorter_than_the_task_runs_it_once(redis_server: Any) -> None:
    """Redis hands a message to the second worker while the first one is busy with it."""
    broker, store = redis_server.new_database(), redis_server.new_database()
    with (
        Shop(broker, store, transport_options={"visibility_timeout": 1}, idempotency_keep_visible=False) as shop,
        shop.tasks.worker(concurrency=1),
        shop.tasks.worker(concurrency=1),
    ):
        result = shop.wait_for_go.apply_async(("go",), task_id="M")
        wait_until(lambda: shop.starts() == 1, 20, "the first body")
        for times in range(1, 4):
            restore_once(shop, lambda times=times: shop.events().count("PARKED") >= times)
        shop.touch("go")
        assert result.get(timeout=30) == "went"
        replayed(shop, 1)
        assert shop.starts() == 1


def restore_once(shop: Shop, done: Any) -> None:
    def visible() -> bool:
        with shop.app.connection_for_read() as connection:
            connection.default_channel.qos.restore_visible(interval=1)
        return bool(done())

    wait_until(visible, 30, f"the restored copy to be parked, not {shop.events()}")


# --- retries --------------------------------------------------------------------------------------


@pytest.mark.parametrize("countdown", [0, 1])
def test_a_retry_runs_each_attempt_once(shop: Shop, countdown: int) -> None:
    with shop.tasks.worker(concurrency=2):
        assert shop.retry_once.delay(countdown).get(timeout=30) == "second"
    assert [run.retries for run in shop.runs("start")] == [0, 1]
    assert not overlapping(shop.runs())


@pytest.mark.crash
def test_a_retry_that_was_published_by_a_child_that_died_loses_and_doubles_nothing(shop: Shop) -> None:
    with shop.tasks.worker(concurrency=2):
        result = shop.killed_in_retry.delay()
        assert result.get(timeout=60) == "second"
        wait_until(lambda: len(shop.runs("end")) >= 1 and "REPLAYED" in shop.events(), 60, "the other successor")
    assert [run.retries for run in shop.runs("end")] == [1]
    assert [run.retries for run in shop.runs("start")].count(1) == 1
    assert not overlapping(shop.runs())


# --- soft limits ----------------------------------------------------------------------------------


def test_a_soft_limit_while_waiting_parks_the_message_and_does_not_fail_it(shop: Shop) -> None:
    with shop.tasks.worker(concurrency=2):
        other = hold(shop, shop.limited_wait, "M", ("paid",))
        result = shop.limited_wait.apply_async(("paid",), task_id="M")
        wait_until(lambda: "PARKED" in shop.events(), 20, "the soft limit to park")
        assert shop.limited_wait.AsyncResult("M").state == "PENDING"
        other()
        assert result.get(timeout=30) == "paid"
    assert shop.starts() == 1


def hold(shop: Shop, task: Any, task_id: str, args: tuple[Any, ...]) -> Any:
    """Hold the message's key from here; the returned function gives it back."""
    from types import SimpleNamespace

    from celery_idem import publish
    from celery_idem.app import runtime_of
    from celery_idem.core.records import Release

    runtime = runtime_of(shop.app)
    policy = runtime.policy_of(task)
    request = SimpleNamespace(id=task_id, headers={}, retries=0, replaced_task_nesting=0)
    stamp = publish.derive(task, policy, args, {}, task_id)
    operation = publish.operation_of(task, policy, runtime, request, stamp, continues=False)
    claim = runtime.store.claim(operation, lease=60, ttl=600).claim
    assert claim is not None

    def give_back() -> None:
        runtime.store.release(claim, Release.YIELDED)
        runtime.close()

    return give_back


def test_a_soft_limit_in_the_body_fails_the_task_and_frees_the_key(shop: Shop) -> None:
    from celery.exceptions import SoftTimeLimitExceeded

    with shop.tasks.worker(concurrency=1):
        with pytest.raises(SoftTimeLimitExceeded):
            shop.limited_body.delay().get(timeout=30)
        (run,) = shop.runs("start")
        assert shop.events() == ["NEW"]
        assert run.attempt == 1


# --- the network ----------------------------------------------------------------------------------


def test_the_broker_cut_between_park_and_ack_loses_nothing_and_doubles_nothing(places: tuple[str, str]) -> None:
    broker, store = places
    with ChaosProxy.before(broker) as proxy, Shop(proxy.url(broker), store) as shop:
        shop.touch("stop-after-park")
        with shop.tasks.worker(concurrency=2):
            shop.wait_for_go.apply_async(("go",), task_id="M")
            wait_until(lambda: shop.starts() == 1, 20, "the first body")
            shop.wait_for_go.apply_async(("go",), task_id="M")
            wait_until(lambda: shop.exists("parked"), 20, "the second copy to be parked")
            proxy.cut()
            shop.touch("go-on")
            shop.touch("go")
            wait_until(lambda: shop.wait_for_go.AsyncResult("M").state == "SUCCESS", 60, "the result")
            replayed(shop, 1, timeout=60)
        assert shop.starts() == 1


def test_a_store_that_cannot_be_reached_for_a_while_only_delays(places: tuple[str, str]) -> None:
    broker, store = places
    with ChaosProxy.before(store) as proxy, Shop(broker, proxy.url(store)) as shop, shop.tasks.worker(concurrency=2):
        running = shop.wait_for_go.apply_async(("go",), task_id="M")
        wait_until(lambda: shop.starts() == 1, 20, "the first body")
        proxy.refuse = True
        proxy.cut()
        waiting = shop.work.apply_async((0, "late"), task_id="N")
        shop.touch("go")
        wait_until(lambda: len(shop.runs("end")) == 1, 20, "the first body's end")
        assert running.state != "SUCCESS", "a value must not go on before it is recorded"
        proxy.heal()
        assert running.get(timeout=30) == "went"
        assert waiting.get(timeout=30) == "late"
        assert shop.starts() == 2
        assert shop.wait_for_go.apply_async(("go",), task_id="M").get(timeout=30) == "went"
        assert shop.starts() == 2
        assert "COMPLETE_FAILED" not in shop.events()


@pytest.mark.parametrize("verb", ["claim", "complete"])
def test_a_lost_reply_of_the_store_runs_the_body_once(places: tuple[str, str], verb: str) -> None:
    broker, store = places
    with ChaosProxy.before(store) as proxy, Shop(broker, proxy.url(store)) as shop, shop.tasks.worker(concurrency=1):
        assert shop.work.delay(0, "warm").get(timeout=30) == "warm"
        if verb == "claim":
            proxy.drop_replies()
        running = shop.wait_for_go.delay("go")
        if verb == "complete":
            wait_until(lambda: shop.starts() == 2, 20, "the body")
            proxy.drop_replies()
        shop.touch("go")
        wait_until(lambda: proxy.dropped > 0, 20, "a lost reply")
        proxy.heal()
        assert running.get(timeout=40) == "went"
        assert shop.starts() == 2
        assert [run.attempt for run in shop.runs("start")] == [1, 1]
