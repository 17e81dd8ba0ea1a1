"""Real kombu consumers, without Celery, on real brokers: once, also where two have it, one dies, or nothing answers."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from kombu import Connection, Queue

from tests.support.chaos_proxy import ChaosProxy
from tests.support.processes import Process, remove_dir, scratch_dir, wait_until
from tests.support.workers import ROOT

pytestmark = [pytest.mark.redis, pytest.mark.rabbitmq]

SOURCE = """
import json, os, signal, sys, time
from pathlib import Path

from kombu import Connection, Queue
from kombu.mixins import ConsumerProducerMixin

from celery_idem import Policy, current
from celery_idem.consumer import IdempotentConsumer

HERE = Path(__file__).parent
SAID = json.loads(sys.argv[1])

def write(name, *words):
    with open(HERE / name, "a") as f:
        f.write(" ".join(map(str, words)) + "\\n")

def charge(body, message):
    write("runs", "start", body["order"], current().attempt, os.getpid())
    if body.get("wait"):
        while not (HERE / body["wait"]).exists():
            time.sleep(0.01)
    if body.get("fail"):
        raise ValueError("declined")
    write("runs", "end", body["order"], current().attempt, os.getpid())

def dead_letter(body, message, error):
    worker.producer.publish(body, routing_key=SAID["queue"] + ".dead", headers={"error": str(error)},
                            declare=[Queue(SAID["queue"] + ".dead")], message_id=message.properties["message_id"])

idem = IdempotentConsumer(SAID["store"], delay=0.5, store_timeout=1)
idem.emit.listeners.append(lambda event: write("events", event.name.value, event.fields["message_id"]))

class Worker(ConsumerProducerMixin):
    on_iteration = idem.on_iteration

    def __init__(self, connection):
        self.connection = connection

    def get_consumers(self, Consumer, channel):
        policy = Policy(name="charge", key="order:{order}", fingerprint=["order"], lease=SAID["lease"])
        handles = idem.handles(charge, policy, max_attempts=SAID["max_attempts"],
                               dead_letter=dead_letter if SAID["hook"] else None)
        queue = Queue(SAID["queue"], queue_arguments=SAID["arguments"])
        return [Consumer([queue], accept=["json"], prefetch_count=SAID["prefetch"], **handles)]

    def on_connection_revived(self):
        write("connections", os.getpid())

def stop(*_):
    worker.should_stop = True

signal.signal(signal.SIGTERM, stop)
with Connection(SAID["broker"], heartbeat=SAID["heartbeat"], transport_options=SAID["options"]) as connection:
    worker = Worker(connection)
    worker.run()
idem.close()
"""


class Orders:
    """A queue, consumers of it in their own processes, and what they wrote."""

    def __init__(self, broker: str, store: str, **said: Any) -> None:
        self.dir = scratch_dir("consumer")
        (self.dir / "orders.py").write_text(SOURCE)
        options = {"visibility_timeout": 5} if broker.startswith("redis") else {}
        defaults = {
            "queue": self.dir.name,
            "lease": 60,
            "max_attempts": 5,
            "hook": True,
            "heartbeat": 0,
            "prefetch": 10,
        }
        self.said: dict[str, Any] = {**defaults, "arguments": None, "options": options, **said}
        self.said |= {"broker": broker, "store": store}
        self.queue = Queue(self.said["queue"], queue_arguments=self.said["arguments"])
        self.dead = Queue(self.said["queue"] + ".dead")
        self.connection = Connection(broker, transport_options=options)
        self.processes: list[Process] = []

    def consume(self, **said: Any) -> Process:
        """Start a consumer, and return when it consumes."""
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        argv = [sys.executable, "orders.py", json.dumps({**self.said, **said})]
        name = f"consumer {len(self.processes)}"
        process = Process(argv, name=name, log_path=self.dir / f"{name}.log", env=env, cwd=self.dir)
        self.processes.append(process)
        wait_until(lambda: [str(process.pid)] in self.lines("connections"), 30, f"{name} to connect")
        return process

    def send(self, order: int = 1, message_id: str = "M", **body: Any) -> None:
        with self.connection.Producer() as producer:
            producer.publish(
                {"order": order, **body},
                routing_key=self.queue.name,
                declare=[self.queue],
                message_id=message_id,
                delivery_mode=2,
            )

    def lines(self, name: str) -> list[list[str]]:
        path = self.dir / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def runs(self, word: str = "start") -> list[str]:
        """Orders whose handler began, or ended."""
        return [order for said, order, *_ in self.lines("runs") if said == word]

    def events(self, message_id: str = "M") -> list[str]:
        return [name for name, of in self.lines("events") if of == message_id]

    def wait_runs(self, orders: list[str], word: str = "end", timeout: float = 30) -> None:
        wait_until(lambda: sorted(self.runs(word)) == orders, timeout, f"{word} of {orders}, not {self.lines('runs')}")

    def wait_event(self, name: str, message_id: str = "M", times: int = 1, timeout: float = 30) -> None:
        got = lambda: self.events(message_id).count(name) >= times  # noqa: E731
        wait_until(got, timeout, f"{times} {name} of {message_id}, not {self.lines('events')}")

    def touch(self, name: str) -> None:
        (self.dir / name).touch()

    def take(self, queue: Queue) -> Any:
        """The queue's next message, acked; None where it holds none."""
        queue = queue(self.connection.default_channel)
        queue.declare()
        message = queue.get()
        if message is not None:
            message.ack()
        return message

    def assert_all_acked(self) -> None:
        """End every consumer, and find the queue empty: what is unacked comes back to it then."""
        for process in self.processes:
            process.send(signal.SIGTERM)
        for process in self.processes:
            process.wait(30)
        assert self.take(self.queue) is None

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.connection.release()
        remove_dir(self.dir)


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request: Any) -> str:
    return str(request.getfixturevalue("amqp_url" if request.param == "rabbitmq" else "redis_url"))


@pytest.fixture
def store(redis_server: Any) -> str:
    return str(redis_server.new_database())


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Orders] = []

    def orders(*args: Any, **said: Any) -> Orders:
        made.append(Orders(*args, **said))
        return made[-1]

    yield orders
    for one in made:
        one.close()


@pytest.fixture
def orders(make: Any, broker: str, store: str) -> Orders:
    return make(broker, store)  # type: ignore[no-any-return]


def test_one_message_published_three_times_runs_once(orders: Orders) -> None:
    for _ in range(3):
        orders.send()
    orders.consume()
    orders.wait_event("REPLAYED", times=2)
    assert orders.runs() == ["1"]
    orders.assert_all_acked()


def test_of_two_consumers_with_one_key_one_runs_it_and_the_other_goes_on_with_the_rest(orders: Orders) -> None:
    first, second = orders.consume(), orders.consume()
    orders.send(1, "M", wait="go")
    orders.wait_runs(["1"], "start")
    free = second if orders.lines("runs")[0][-1] == str(first.pid) else first
    orders.send(1, "N", wait="go")
    orders.send(1, "O", wait="go")  # the broker may give one of the two to the busy consumer
    wait_until(lambda: orders.events("N") or orders.events("O"), 30, "a held message")
    for number in range(2, 6):
        orders.send(number, str(number))
    wait_until(lambda: len(orders.runs("end")) >= 2, 30, "others to run meanwhile")
    assert {line[-1] for line in orders.lines("runs") if line[1] != "1"} == {str(free.pid)}
    assert "1" not in orders.runs("end")
    orders.touch("go")
    orders.wait_runs(["1", "2", "3", "4", "5"])
    orders.wait_event("REPLAYED", "N")
    orders.wait_event("REPLAYED", "O")
    assert sorted(orders.runs()) == ["1", "2", "3", "4", "5"]
    orders.assert_all_acked()


@pytest.mark.crash
def test_a_consumer_killed_in_its_handler_is_followed_by_another_at_once(orders: Orders) -> None:
    first = orders.consume()
    orders.send(1, "M", wait="go")
    orders.wait_runs(["1"], "start")
    first.kill_tree()
    orders.touch("go")
    restore(orders)
    orders.consume()
    orders.wait_runs(["1"])
    assert [line[2] for line in orders.lines("runs") if line[0] == "start"] == ["1", "2"]
    assert orders.events() == ["NEW", "LEASE_RECLAIMED"]


def restore(orders: Orders) -> None:
    """Have a Redis broker give back what no live consumer acked; kombu itself looks now and then."""
    if orders.said["broker"].startswith("redis"):
        wait_until(lambda: look(orders), 30, "the message to come back")


def look(orders: Orders) -> int:
    channel = orders.connection.default_channel
    if orders.said["broker"].startswith("redis"):
        channel.qos.restore_visible(interval=1)
    return int(orders.queue(channel).queue_declare().message_count)


@pytest.mark.crash
def test_exceptions_are_counted_across_processes_and_the_last_leads_to_the_dead_letters(orders: Orders) -> None:
    orders.send(1, "M", fail=True)
    first = orders.consume(max_attempts=3)
    orders.wait_runs(["1", "1"], "start")
    wait_until(lambda: "attempt 2 of 3" in first.log, 30, "the second exception to be counted")
    first.kill_tree()
    restore(orders)
    second = orders.consume(max_attempts=3)
    orders.wait_runs(["1", "1", "1"], "start")
    message = wait_until(lambda: orders.take(orders.dead), 30, "the dead letter")
    assert (message.payload, message.headers["error"]) == ({"order": 1, "fail": True}, "declined")
    assert "attempt 3 of 3" in second.log
    orders.assert_all_acked()


def test_without_a_hook_the_queues_own_exchange_gets_the_dead_letter(make: Any, amqp_url: str, store: str) -> None:
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "graveyard"}
    orders = make(amqp_url, store, hook=False, max_attempts=1, arguments=arguments)
    graveyard = Queue("graveyard")
    assert orders.take(graveyard) is None  # declares it
    orders.send(1, "M", fail=True)
    orders.consume()
    message = wait_until(lambda: orders.take(graveyard), 30, "the dead letter")
    assert message.headers["x-death"][0]["reason"] == "rejected"
    orders.assert_all_acked()


def test_a_held_message_outlives_the_delivery_limit_of_a_quorum_queue(make: Any, amqp_url: str, store: str) -> None:
    orders = make(amqp_url, store, arguments={"x-queue-type": "quorum", "x-delivery-limit": 1})
    orders.consume(prefetch=1)
    orders.send(1, "M", wait="go")
    orders.wait_runs(["1"], "start")
    orders.consume()
    orders.send(1, "N", wait="go")
    orders.wait_event("CONFLICT", "N", times=3)
    orders.touch("go")
    orders.wait_event("REPLAYED", "N")
    orders.assert_all_acked()


def test_a_held_message_costs_neither_the_connection_nor_the_processor(make: Any, amqp_url: str, store: str) -> None:
    orders = make(amqp_url, store, heartbeat=4)
    busy = orders.consume(heartbeat=0, prefetch=1)
    orders.send(1, "M", wait="go")
    orders.wait_runs(["1"], "start")
    idle = orders.consume()
    orders.send(1, "N")
    orders.wait_event("CONFLICT", "N")
    before = sum(psutil.Process(idle.pid).cpu_times()[:2])
    orders.wait_event("CONFLICT", "N", times=6)  # over 11 s: RabbitMQ closes a connection that is silent for 8
    assert sum(psutil.Process(idle.pid).cpu_times()[:2]) - before < 1
    orders.touch("go")
    orders.wait_event("REPLAYED", "N")
    orders.assert_all_acked()
    assert orders.lines("connections") == [[str(busy.pid)], [str(idle.pid)]]
    assert orders.events("N").count("REPLAYED") == 1, "it came again, so its connection was lost"


def test_a_lease_is_renewed_while_the_handler_has_the_thread(make: Any, broker: str, store: str) -> None:
    orders = make(broker, store, lease=4)
    orders.consume(prefetch=1)
    orders.send(1, "M", wait="go")
    orders.wait_runs(["1"], "start")
    orders.consume()
    orders.send(1, "N")
    orders.wait_event("CONFLICT", "N", times=5)  # over more than a lease
    orders.touch("go")
    orders.wait_event("REPLAYED", "N")
    assert orders.runs() == ["1"]


def test_a_connection_cut_while_a_message_is_held_loses_and_doubles_nothing(make: Any, broker: str, store: str) -> None:
    with ChaosProxy.before(broker) as proxy:
        orders = make(broker, store)
        orders.consume(prefetch=1)
        orders.send(1, "M", wait="go")
        orders.wait_runs(["1"], "start")
        orders.consume(broker=proxy.url(broker))
        orders.send(1, "N")
        orders.wait_event("CONFLICT", "N", times=2)
        proxy.cut()
        wait_until(lambda: len(orders.lines("connections")) >= 3, 30, "the consumer to connect again")
        orders.touch("go")
        wait_until(lambda: look(orders) == 0 and "REPLAYED" in orders.events("N"), 30, "the held message")
        assert orders.runs() == ["1"]
        orders.assert_all_acked()


@pytest.mark.parametrize("outage", ["refused", "silent", "cut off"])
def test_a_store_that_does_not_answer_keeps_the_messages_and_loses_none(
    make: Any, broker: str, store: str, outage: str
) -> None:
    with ChaosProxy.before(store) as proxy:
        orders = make(broker, proxy.url(store))
        proxy.refuse, proxy.blackhole = outage == "refused", outage == "silent"
        if outage == "cut off":
            proxy.drop_replies()
        orders.send()
        orders.consume()
        orders.wait_event("STORAGE_ERROR", times=2)
        proxy.heal()
        orders.wait_runs(["1"])
        assert orders.runs() == ["1"]
        orders.assert_all_acked()


def test_a_consumer_that_stops_leaves_what_it_held_to_the_next(orders: Orders) -> None:
    orders.consume(prefetch=1)
    orders.send(1, "M", wait="go")
    orders.wait_runs(["1"], "start")
    leaving = orders.consume()
    orders.send(1, "N")
    orders.wait_event("CONFLICT", "N")
    leaving.send(signal.SIGTERM)
    leaving.wait(30)
    orders.touch("go")
    orders.wait_event("REPLAYED", "N")
    assert orders.runs() == ["1"]
    orders.assert_all_acked()
