"""Parked copies on real brokers: to their own queue alone, few at a time, and back soon after the key is free."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery, chain, chord

from celery_idem.app import runtime_of
from celery_idem.parking import confirmed_producer
from celery_idem.stores.base import open_store
from tests.integration.shop import SOURCE, Shop
from tests.integration.test_delivery import hold, replayed
from tests.support.workers import TaskApp, wait_until

pytestmark = [pytest.mark.redis, pytest.mark.postgres, pytest.mark.rabbitmq]

MORE = """
from celery import chain, chord
from celery.signals import task_received
from kombu import Exchange, Queue
from kombu.common import Broadcast

@task_received.connect(weak=False)
def came(request=None, **_):
    info = request.delivery_info
    write("came", request.id, time.time(), info["exchange"] or "-", info["routing_key"])

@app.task(base=Logged, bind=True)
def where(self):
    self.log("start")
    info = self.request.delivery_info
    return [info["exchange"], info["routing_key"], info["priority"]]

@app.task(base=Logged, bind=True, rate_limit="6/m")
def limited(self, seconds):
    self.log("start")
    time.sleep(seconds)
    return "done"

@app.task(base=Logged, bind=True)
def add(self, x, y):
    self.log("start")
    return x + y

@app.task(base=Logged, bind=True)
def total(self, numbers):
    self.log("start")
    return sum(numbers)
"""


class ParkShop(Shop):
    """The shop with queues and tasks of its own."""

    def __init__(self, broker: str, store: str, more: str = "", *, chords: bool = False, **settings: Any) -> None:
        conf = {"idempotency_store": store, **settings}
        backend = store if chords else None  # Redis, which counts chord parts by itself
        self.tasks = TaskApp(SOURCE + MORE + more, broker=broker, backend=backend, settings=conf)

    def times(self, name: str = "PARKED") -> int:
        """How often an event was told."""
        return self.events().count(name)

    def came(self) -> list[list[str]]:
        """Messages the workers received: id, time, exchange, routing key."""
        path = self.tasks.path("came")
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


Place = Callable[..., ParkShop]


@pytest.fixture
def on_redis(redis_server: Any) -> Iterator[Place]:
    yield from places(lambda: (redis_server.new_database(), redis_server.new_database()))


@pytest.fixture
def on_rabbit(amqp_url: str, redis_server: Any) -> Iterator[Place]:
    yield from places(lambda: (amqp_url, redis_server.new_database()))


@pytest.fixture(params=["redis", "rabbitmq"])
def anywhere(request: Any) -> Place:
    place: Place = request.getfixturevalue("on_redis" if request.param == "redis" else "on_rabbit")
    return place


def places(urls: Callable[[], tuple[str, str]]) -> Iterator[Place]:
    made: list[ParkShop] = []

    def make(more: str = "", **settings: Any) -> ParkShop:
        made.append(ParkShop(*urls(), more, **settings))
        return made[-1]

    yield make
    for shop in made:
        shop.tasks.close()


@contextmanager
def published_twice(shop: ParkShop, *ids: str) -> Iterator[None]:
    """Have every message published here reach the broker twice, those with these ids alone if any are named."""
    amqp: Any = shop.app.amqp
    send = amqp.send_task_message

    def twice(producer: Any, name: str, message: Any, **options: Any) -> Any:
        if not ids or message.properties["correlation_id"] in ids:
            again = type(message)(*(copy.deepcopy(part) for part in message))
            send(producer, name, again, **copy.copy(options))
        return send(producer, name, message, **options)

    amqp.send_task_message = twice
    try:
        yield
    finally:
        amqp.send_task_message = send


# --- few copies, few publishes --------------------------------------------------------------------


def test_a_message_restored_again_and_again_has_three_copies_at_most(on_redis: Place) -> None:
    """Redis hands out anew what is unacked for longer than its visibility timeout; nothing stops it here.

    The sweep takes all that is 0.6 s old, as if parked copies stood behind long bodies: each is then on the
    broker and in a worker's memory, and both of them park. Were none dropped, there would be twenty within seconds.
    """
    shop = on_redis(broker_transport_options={"visibility_timeout": 3}, idempotency_keep_visible=False)
    counts: list[int] = []
    with (
        shop.tasks.worker(concurrency=1, extra=["--prefetch-multiplier", "4"]),
        shop.tasks.worker(concurrency=2, extra=["--prefetch-multiplier", "4"]),
    ):
        result = shop.wait_for_go.apply_async(("go",), task_id="M")
        wait_until(lambda: shop.starts() == 1, 20, "the first body")
        until = time.monotonic() + 15
        while time.monotonic() < until:
            with shop.app.connection_for_read(transport_options={"visibility_timeout": 0.6}) as connection:
                channel = connection.default_channel
                channel.qos.restore_visible(interval=1)
                counts.append(copies(channel.client, shop.tasks.queue, "M"))
            time.sleep(0.1)
        shop.touch("go")
        assert result.get(timeout=30) == "went"
        replayed(shop, 1)
    assert shop.starts() == 1
    assert len(shop.came()) >= 15, "the broker did not give it back often enough to tell"
    assert max(counts) <= 3, counts


def copies(client: Any, queue: str, message_id: str) -> int:
    """Copies of a message on a Redis broker: waiting, and held by workers."""
    pipe = client.pipeline(transaction=True)
    pipe.hvals("unacked")
    pipe.lrange(queue, 0, -1)
    held, waiting = pipe.execute()
    return sum(f'"correlation_id": "{message_id}"'.encode() in raw for raw in [*held, *waiting])


def test_a_parked_message_is_published_eight_times_a_minute_at_most_and_comes_back_within_fifteen_seconds(
    on_redis: Place,
) -> None:
    shop = on_redis()
    with shop.tasks.worker(concurrency=2):
        give_back = hold(shop, shop.work, "M", (0, "paid"))
        result = shop.work.apply_async((0, "paid"), task_id="M")
        wait_until(lambda: shop.times() >= 4, 30, "four parks")
        give_back()  # into the longest wait but one, of 8 s
        freed = time.time()
        assert result.get(timeout=30) == "paid"
    (run,) = shop.runs("start")
    assert run.at - freed <= 20
    came = [float(when) for _, when, *_ in shop.came()]
    assert len(came) == shop.times() + 1, "one arrival per park"
    assert shop.times() <= 6, "more than the delays of 1, 2, 4, 8 and 15 s allow"


# --- its own queue --------------------------------------------------------------------------------

THREE = """
app.conf.task_queues = [
    Queue(f"{app.conf.task_default_queue}.{n}", Exchange(app.conf.task_default_queue + ".x", type="topic"), pattern)
    for n, pattern in enumerate(["order.*", "#.paid", "order.paid"])
]
"""


@pytest.mark.parametrize(("broker", "workers"), [("on_redis", "one"), ("on_rabbit", "three")])
def test_a_message_routed_to_three_queues_is_parked_to_its_own_alone(request: Any, broker: str, workers: str) -> None:
    """Published to the exchange again, each copy would come back three times: 242 parks in nine seconds."""
    place: Place = request.getfixturevalue(broker)
    shop = place(THREE, task_default_exchange="x", task_default_exchange_type="topic")
    names = [f"{shop.tasks.queue}.{n}" for n in range(3)]
    consumers = [names] if workers == "one" else [[name] for name in names]
    started = [shop.tasks.worker(concurrency=4 // len(consumers), queues=queues) for queues in consumers]
    for worker in started:
        worker.start(wait=False)
    for worker in started:
        worker.wait_ready()
    place = {"exchange": f"{shop.tasks.queue}.x", "routing_key": "order.paid", "declare": shop.app.conf.task_queues}
    result = shop.wait_for_go.apply_async(("go",), task_id="M", **place)
    wait_until(lambda: len(shop.came()) >= 3, 20, "three copies")
    first = float(shop.came()[0][1])
    wait_until(lambda: time.time() > first + 9, 30, "nine seconds")
    parks = shop.times()
    shop.touch("go")
    assert result.get(timeout=30) == "went"
    replayed(shop, 1)
    assert shop.starts() == 1
    assert 2 <= parks <= 10, f"{parks} parks in nine seconds"
    parked = [place for _, _, *place in shop.came()][3:]
    assert {exchange for exchange, _ in parked} == {"-"}
    assert {key for _, key in parked} <= set(names)


def test_a_copy_is_parked_to_the_queue_it_came_from_whatever_routes_the_task_has(on_redis: Place) -> None:
    shop = on_redis(
        "app.conf.task_queues = [Queue(f'{app.conf.task_default_queue}.{n}') for n in 'ab']\n"
        "app.conf.task_routes = {'*.where': {'exchange': app.conf.task_default_queue + '.b',\n"
        "                                    'routing_key': app.conf.task_default_queue + '.b'}}\n"
    )
    a = f"{shop.tasks.queue}.a"
    with shop.tasks.worker(concurrency=1):
        give_back = hold(shop, shop.where, "M", ())
        result = shop.where.apply_async(task_id="M", queue=a, exchange="", routing_key=a)
        wait_until(lambda: shop.times() >= 1, 20, "the park")
        give_back()
        assert result.get(timeout=30)[:2] == ["", a]


def test_a_broadcast_runs_in_every_worker(anywhere: Place) -> None:
    shop = anywhere("app.conf.task_queues = [Broadcast(app.conf.task_default_queue + '.all')]\n")
    with shop.tasks.worker(concurrency=1), shop.tasks.worker(concurrency=1):
        (queue,) = shop.app.conf.task_queues
        shop.work.apply_async((0.5,), task_id="M", queue=f"{shop.tasks.queue}.all", declare=[queue.exchange])
        wait_until(lambda: len(shop.runs("end")) == 2, 20, "a run in each worker")
    assert len({run.pid for run in shop.runs("start")}) == 2
    assert shop.events() == []


# --- what a parked copy keeps ---------------------------------------------------------------------


def test_a_parked_copy_keeps_its_priority(anywhere: Place) -> None:
    shop = anywhere(task_queue_max_priority=9, broker_transport_options={"priority_steps": [0, 3, 6, 9]})
    with shop.tasks.worker(concurrency=1):
        give_back = hold(shop, shop.where, "M", ())
        result = shop.where.apply_async(task_id="M", priority=6)
        wait_until(lambda: shop.times() >= 2, 20, "the second park")
        give_back()
        assert result.get(timeout=30) == ["", shop.tasks.queue, 6]


def test_a_copy_that_expires_while_parked_does_not_fail_its_running_original(anywhere: Place) -> None:
    shop = anywhere()
    with shop.tasks.worker(concurrency=2):
        result = shop.wait_for_go.apply_async(("go",), task_id="M", expires=6)
        wait_until(lambda: shop.starts() == 1, 20, "the first body")
        shop.wait_for_go.apply_async(("go",), task_id="M", expires=5)
        expired = datetime.now(timezone.utc).timestamp() + 6
        wait_until(lambda: shop.times() >= 4 and time.time() > expired, 40, "a park after the expiry")
        assert result.state == "PENDING"
        shop.touch("go")
        assert result.get(timeout=30) == "went"
        replayed(shop, 1)
        assert result.state == "SUCCESS"


def test_a_revoke_of_a_parked_copy_does_not_fail_its_running_original(anywhere: Place) -> None:
    """A revoke by id stops what has not begun. Of a message that runs, its parked copies are none of that."""
    shop = anywhere(chords=True)
    with shop.tasks.worker(concurrency=3):
        header = [shop.wait_for_go.s("go").set(task_id="M"), shop.add.s(1, 1)]
        with published_twice(shop, "M"):
            body = chord(header)(shop.where.si())
        wait_until(lambda: "M" in {run.id for run in shop.runs("start")}, 20, "the first body")
        wait_until(lambda: shop.times() >= 1, 20, "the copy to be parked")
        shop.app.control.revoke("M")
        came = len(shop.came())
        wait_until(lambda: len(shop.came()) > came, 20, "the parked copy to come back")
        wait_until(lambda: shop.times() >= 2, 20, "it to be parked again")
        shop.touch("go")
        wait_until(lambda: body.state == "SUCCESS", 20, "the chord's body")
        assert shop.wait_for_go.AsyncResult("M").state == "SUCCESS"


def test_a_revoked_parked_copy_does_not_run_once_the_key_is_free(on_redis: Place) -> None:
    shop = on_redis()
    with shop.tasks.worker(concurrency=1):
        give_back = hold(shop, shop.work, "M", (0,))
        result = shop.work.apply_async((0,), task_id="M")
        wait_until(lambda: shop.times() >= 1, 20, "the park")
        shop.app.control.revoke("M")
        give_back()
        wait_until(lambda: result.state == "REVOKED", 20, "the revoke")
    assert shop.starts() == 0


def test_a_copy_of_a_rate_limited_task_waits_in_its_slot_rather_than_spend_a_token(on_redis: Place) -> None:
    shop = on_redis()
    with shop.tasks.worker(concurrency=1), shop.tasks.worker(concurrency=1):
        shop.limited.apply_async((2.5,), task_id="M")
        result = shop.limited.apply_async((2.5,), task_id="M")
        assert result.get(timeout=30) == "done"
        replayed(shop, 1)
    assert shop.starts() == 1
    assert shop.times() == 0


# --- where messages wait --------------------------------------------------------------------------

QUORUM = """
app.conf.task_queues = [
    Queue(app.conf.task_default_queue, Exchange(app.conf.task_default_queue + ".x", type="topic"),
          app.conf.task_default_queue, queue_arguments={"x-queue-type": "quorum"}),
    Queue("other." + app.conf.task_default_queue, Exchange(app.conf.task_default_queue + ".x", type="topic"),
          "other." + app.conf.task_default_queue, queue_arguments={"x-queue-type": "quorum"}),
]
"""


def test_parked_copies_of_a_quorum_queue_wait_in_the_broker_and_block_no_worker(on_rabbit: Place) -> None:
    """There a worker cannot raise its prefetch, so copies held in its memory would keep everything else out."""
    shop = on_rabbit(QUORUM, task_default_exchange_type="topic", broker_native_delayed_delivery_queue_type="quorum")
    with shop.tasks.worker(concurrency=1, queues=[shop.tasks.queue, f"other.{shop.tasks.queue}"]):
        held = [hold(shop, shop.where, f"M{n}", ()) for n in range(4)]
        waiting = [shop.where.apply_async(task_id=f"M{n}") for n in range(4)]
        wait_until(lambda: shop.times() >= 16, 60, "four parks of each")
        began = time.monotonic()
        assert shop.add.delay(1, 2).get(timeout=30) == 3
        assert time.monotonic() - began < 6, "parked copies, which come back after 8 s, kept a message out"
        for give_back in held:
            give_back()
        assert {tuple(result.get(timeout=30)) for result in waiting}
        time.sleep(1)
        delayed = shop.where.apply_async(task_id="D", countdown=2)
        assert delayed.get(timeout=30)
    assert sorted(run.id for run in shop.runs("start") if run.id.startswith("M")) == ["M0", "M1", "M2", "M3"]
    assert len(shop.came()) == shop.times() + 6, "a park brought more or less than one message"


def test_what_we_publish_is_confirmed_whatever_the_app_says_and_its_own_is_not(amqp_url: str) -> None:
    app = Celery("shop", broker=amqp_url, set_as_current=False)
    app.conf.update(idempotency_store="memory://", broker_transport_options={"confirm_publish": False})
    queue = f"q_{uuid.uuid4().hex[:10]}"
    try:
        with confirmed_producer(app) as ours, app.producer_or_acquire() as own:
            for producer, confirmed in ((ours, True), (own, False)):
                producer.publish("x", routing_key=queue)
                assert producer.channel._confirm_selected is confirmed
    finally:
        runtime_of(app).confirming.release()
        app.close()


def test_a_delayed_original_of_a_quorum_queue_is_parked_to_its_queue(on_rabbit: Place) -> None:
    shop = on_rabbit(QUORUM, task_default_exchange_type="topic")
    with shop.tasks.worker(concurrency=1, queues=[f"other.{shop.tasks.queue}"]):
        give_back = hold(shop, shop.where, "M", ())
        result = shop.where.apply_async(task_id="M", countdown=2, queue=f"other.{shop.tasks.queue}")
        wait_until(lambda: shop.times() >= 2, 30, "two parks")
        give_back()
        assert result.get(timeout=30)
    assert len(shop.came()) == shop.times() + 1
    assert shop.came()[-1][3].endswith(f".other.{shop.tasks.queue}.celery_idem")


def test_a_limit_on_waiting_messages_does_not_stop_parked_ones(on_redis: Place) -> None:
    shop = on_redis(worker_eta_task_limit=2)
    with shop.tasks.worker(concurrency=1):
        held = [hold(shop, shop.work, f"M{n}", (0,)) for n in range(4)]
        waiting = [shop.work.apply_async((0,), task_id=f"M{n}") for n in range(4)]
        wait_until(lambda: shop.times() >= 6, 40, "six parks")
        for give_back in held:
            give_back()
        assert [result.get(timeout=40) for result in waiting] == ["done"] * 4
    assert shop.starts() == 4


def test_a_message_of_the_filesystem_broker_is_parked_with_its_delay() -> None:
    with ParkShop("filesystem://", "sqlite:///claims.db") as shop, pytest.MonkeyPatch.context() as patch:
        patch.chdir(shop.tasks.dir)
        store = open_store("sqlite:///claims.db", timeout=30)
        store.create_schema()
        store.close()
        with shop.tasks.worker(concurrency=1):
            give_back = hold(shop, shop.work, "M", (0,))
            result = shop.work.apply_async((0,), task_id="M")
            wait_until(lambda: shop.times() >= 2, 30, "two parks")
            give_back()
            assert result.get(timeout=30) == "done"


# --- task protocol 1: everything in the body, and headers all the same ----------------------------


@pytest.fixture
def old(on_redis: Place) -> ParkShop:
    return on_redis(chords=True, task_protocol=1, broker_transport_options={"visibility_timeout": 9})


def test_protocol_1_runs_a_doubled_message_once(old: ParkShop) -> None:
    with old.tasks.worker(concurrency=2):
        with published_twice(old):
            assert old.work.delay(0.5, "paid").get(timeout=30) == "paid"
            assert old.charge.apply_async((1, 50), idempotency_key="K").get(timeout=30)["order"] == 1
        assert old.charge.apply_async((1, 50), idempotency_key="K").get(timeout=30)["order"] == 1
        replayed(old, 3)
    assert old.starts() == 2


def test_protocol_1_retries_once_per_attempt(old: ParkShop) -> None:
    with old.tasks.worker(concurrency=2):
        with published_twice(old):
            result = old.retry_once.delay(1)
        assert result.get(timeout=30) == "second"
        wait_until(
            lambda: len(old.came()) >= 3 and {"REPLAYED", "OVER"} & set(old.events()), 90, "the other copy's end"
        )
    assert [run.retries for run in old.runs("start")] == [0, 1]


def test_protocol_1_continues_a_canvas_once(old: ParkShop) -> None:
    with old.tasks.worker(concurrency=2):
        with published_twice(old):
            linked = old.add.apply_async((1, 1), link=old.add.s(10))
            chained = chain(old.add.s(1, 2), old.add.s(3)).apply_async()
            counted = chord([old.add.s(1, 1), old.add.s(2, 2)])(old.total.s())
        assert (linked.get(timeout=30), chained.get(timeout=30), counted.get(timeout=30)) == (2, 6, 6)
        wait_until(lambda: len(old.came()) >= 11, 20, "every copy")
        replayed(old, 4)
    assert old.starts() == 7


def test_protocol_1_parks_a_message_with_its_key_count_and_expiry(old: ParkShop) -> None:
    with old.tasks.worker(concurrency=1):
        give_back = hold(old, old.work, "M", (0,))
        kept, late = old.work.apply_async((0,), task_id="M", expires=60), hold(old, old.work, "N", (0,))
        expiring = old.work.apply_async((0,), task_id="N", expires=3)
        wait_until(lambda: old.times() >= 6, 40, "three parks of each")
        give_back()
        late()
        assert kept.get(timeout=30) == "done"
        wait_until(lambda: expiring.state == "REVOKED", 20, "the expiry")
    assert [run.id for run in old.runs("start")] == ["M"]


def test_protocol_1_without_our_headers_is_parked_and_replayed_as_well(old: ParkShop) -> None:
    """What a producer that knows nothing of us sends."""
    body = {"task": old.wait_for_go.name, "id": "M", "args": ["go"], "kwargs": {}, "retries": 0}
    with old.tasks.worker(concurrency=2):
        with old.app.producer_or_acquire(None) as producer:
            for _ in range(2):
                producer.publish(body, exchange="", routing_key=old.tasks.queue, serializer="json")
        wait_until(lambda: old.times() >= 3, 30, "three parks")
        old.touch("go")
        assert old.wait_for_go.AsyncResult("M").get(timeout=30) == "went"
        replayed(old, 1)
    assert old.starts() == 1
