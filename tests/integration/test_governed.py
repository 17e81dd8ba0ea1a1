"""Governed actions with real workers, brokers and PostgreSQL: one mutation each, whatever is lost, killed or doubled.

The endpoint's own ledger is a directory of files: each request it got is a line, each payment it made a file.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery.result import AsyncResult

from celery_idem.errors import AlreadyDecided
from celery_idem.governed import SQLActionStore
from celery_idem.governed.chain import approve, governance_of, governed_chain, propose
from tests.support.services import PostgresServer, RedisServer
from tests.support.workers import TaskApp, wait_until

pytestmark = [pytest.mark.redis, pytest.mark.postgres, pytest.mark.rabbitmq]

SOURCE = """
import os, signal, time
from pathlib import Path

from celery.signals import task_postrun
from pydantic import BaseModel

import celery_idem.governed.chain
from celery_idem.governed import action

HERE = Path(__file__).parent
KIND = f"payments.refund.{__name__}"

def write(name, *words):
    with open(HERE / name, "a") as f:
        f.write(" ".join(map(str, words)) + "\\n")

def wait_for(name):
    deadline = time.monotonic() + 30
    while not (HERE / name).exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} never came")
        time.sleep(0.01)

class Refund(BaseModel):
    order: str
    way: str = "pay"

@action(KIND, payload=Refund, observe_delay=0.5, observation_window=60, max_observations=6)
class Desk:
    def execute(self, request):
        write("puts", request.payload["order"], request.execution_digest)
        if request.payload["way"] == "hang":
            wait_for("go")
        if request.payload["way"] == "lose":
            raise ConnectionError
        (HERE / request.execution_digest).touch()
        if request.payload["way"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if request.payload["way"] == "silence":
            raise TimeoutError
        return request.completed({"refund": request.payload["order"]})

    def observe(self, request):
        write("looks", request.payload["order"])
        there = (HERE / request.execution_digest).exists()
        return request.completed({"refund": request.payload["order"]}) if there else request.absent()

@task_postrun.connect(weak=False)
def ran(task, task_id, state, **_):
    write("ran", task.name.rpartition(".")[2], state, task_id)

@app.task
def then(result):
    write("then", result["state"], result["result"]["refund"])

@app.task
def oh_no(request, error, traceback):
    write("oh_no", type(error).__name__)
"""

TWICE = """
import copy

send = app.amqp.send_task_message

def twice(producer, name, message, **options):
    again = type(message)(*(copy.deepcopy(part) for part in message))
    send(producer, name, again, **copy.copy(options))
    return send(producer, name, message, **options)

app.amqp.send_task_message = twice
"""


class House:
    """The app, its ledger, and what the endpoint wrote down."""

    def __init__(self, broker: str, store: str, claims: str, more: str = "", **settings: Any) -> None:
        conf = {
            "governed_store": store,
            "governed_lease": 3,
            "governed_sweep_interval": 0.25,
            "governed_sweep_grace": 3,
            "idempotency_store": claims,
            **settings,
        }
        self.tasks = TaskApp(SOURCE + more, broker=broker, settings=conf)
        self.url = store
        with SQLActionStore(store) as made:
            made.create_schema()

    @property
    def app(self) -> Any:
        return self.tasks.app

    @property
    def store(self) -> SQLActionStore:
        return governance_of(self.app).store

    def proposed(self, order: str, way: str = "pay") -> str:
        payload = {"order": order, "way": way}
        return str(propose(self.tasks.module.KIND, payload, idempotency_key=order, app=self.app)["action_id"])

    def approved(self, order: str, way: str = "pay", **more: Any) -> str:
        action_id = self.proposed(order, way)
        approve(action_id, app=self.app, **{"principal": "ann", **more})
        return action_id

    def state(self, action_id: str) -> str:
        return str(self.store.get_action(action_id)["state"])

    def ends(self, *action_ids: str, state: str = "completed", within: float = 40) -> None:
        """Wait until all of them have ended, and in this state."""
        for action_id in action_ids:
            end = lambda action_id=action_id: self.state(action_id) in {"completed", "failed"}  # noqa: E731
            wait_until(end, within, f"action {action_id} ends", interval=0.1)
        assert Counter(map(self.state, action_ids)) == {state: len(action_ids)}

    def happened(self, action_id: str) -> list[str]:
        return [event["event_type"] for event in self.store.list_events(action_id)]

    def lines(self, name: str) -> list[list[str]]:
        path = self.tasks.path(name)
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def puts(self) -> Counter[str]:
        """How often the endpoint was asked for each order."""
        return Counter(order for order, _ in self.lines("puts"))

    def close(self) -> None:
        self.store.close()
        self.tasks.close()


Houses = Callable[..., House]


@pytest.fixture
def houses(redis_server: RedisServer, postgres_server: PostgresServer) -> Iterator[Houses]:
    """Makes a house: Redis broker and claims, PostgreSQL ledger, unless told otherwise."""
    made: list[House] = []

    def make(more: str = "", *, broker: str | None = None, **settings: Any) -> House:
        urls = (broker or redis_server.new_database(), postgres_server.create_database(), redis_server.new_database())
        made.append(House(*urls, more, **settings))
        return made[-1]

    yield make
    for house in made:
        house.close()
        postgres_server.drop_database(house.url)


@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_a_whole_life_with_its_link(houses: Houses, kind: str, request: pytest.FixtureRequest) -> None:
    house = houses(broker=request.getfixturevalue("amqp_url") if kind == "rabbitmq" else None)
    with house.tasks.worker(concurrency=2):
        action_id = house.approved("o-1", link=house.app.tasks[f"{house.tasks.name}.then"].s())
        last = governed_chain(action_id, house.store.get_action(action_id)["chain_id"], house.app).tasks[-1]
        answer = AsyncResult(last.options["task_id"], app=house.app).get(timeout=30)
        assert answer == {"action_id": action_id, "state": "completed", "result": {"refund": "o-1"}}
        wait_until(lambda: house.lines("then"), 20, "the link is called")
    assert house.lines("then") == [["completed", "o-1"]]
    assert house.puts() == {"o-1": 1}
    ran = sorted(name for name, *_ in house.lines("ran"))
    assert ran == ["complete", "dispatch", "observe", "then", "verify"]


def test_duplicate_clicks_from_many_threads_make_one_gate_and_one_mutation(houses: Houses) -> None:
    house = houses()
    action_id = house.proposed("o-1")
    start, outcomes = threading.Barrier(8), []

    def click(who: str) -> None:
        start.wait()
        try:
            approve(action_id, principal=who, app=house.app)
            outcomes.append(f"approved by {who}")
        except AlreadyDecided as refused:
            outcomes.append(f"already {refused.decision} by {refused.by}")

    threads = [threading.Thread(target=click, args=(f"owner-{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first,) = [outcome for outcome in outcomes if not outcome.startswith("already")]
    assert [o for o in outcomes if o != first] == [f"already {first}"] * 7
    with house.tasks.worker(concurrency=2):
        house.ends(action_id)
    assert len([r for r in house.store.list_receipts(action_id) if r["kind"] == "gate"]) == 1
    assert house.puts() == {"o-1": 1}


def test_an_approval_outlives_a_broker_that_is_down(houses: Houses, private_redis: RedisServer) -> None:
    options = {"socket_connect_timeout": 2}
    house = houses(broker=private_redis.url, broker_transport_options=options, governed_sweep_grace=8)
    action_id = house.proposed("o-1")
    private_redis.stop()
    began = time.monotonic()
    approve(action_id, principal="ann", app=house.app)
    assert time.monotonic() - began < 30
    assert house.happened(action_id) == ["proposed", "gated", "enqueued"]
    private_redis.start()
    with house.tasks.worker():
        house.ends(action_id)
    assert house.puts() == {"o-1": 1}
    assert house.happened(action_id).count("enqueued") == 2


def test_lost_messages_are_found_by_every_worker_and_published_by_one(houses: Houses) -> None:
    house = houses(governed_sweep_grace=8)
    action_ids = [house.approved(f"o-{n}") for n in range(10)]
    client = redis.Redis.from_url(house.tasks.broker)
    assert client.llen(house.tasks.queue) == 10
    client.flushdb()  # as a broker does that forgets its last second
    client.close()
    with house.tasks.worker(), house.tasks.worker():
        house.ends(*action_ids)
    assert [house.happened(action_id).count("enqueued") for action_id in action_ids] == [2] * 10
    assert set(house.puts().values()) == {1}
    assert Counter(name for name, *_ in house.lines("ran")) == dict.fromkeys(
        ("dispatch", "observe", "verify", "complete"), 10
    )


def test_many_sweeps_of_a_queue_nobody_reads_leave_one_lineage(houses: Houses) -> None:
    house = houses(governed_sweep_grace=0.5)
    action_id = house.approved("o-1", "lose")
    with house.tasks.worker(queues=["elsewhere"]):  # it sweeps, and takes no message of ours
        wait_until(lambda: house.happened(action_id).count("enqueued") >= 4, 30, "it was swept three times")
    with house.tasks.worker(concurrency=2) as worker:
        looked = lambda: len(house.lines("looks")) >= 4  # noqa: E731
        wait_until(looked, 30, "it is looked for")
        waiting = [line for line in house.lines("ran") if line[:2] == ["observe", "RETRY"]]
        assert len({task_id for *_, task_id in waiting}) == 1, "one chain alone does the waiting"
        worker.term()
    assert house.puts() == {"o-1": 1}


def test_the_switch_is_closed_and_opened(houses: Houses) -> None:
    house = houses()
    house.store.set_admission(False, "month end", actor="ops")
    with house.tasks.worker():
        action_ids = [house.approved(f"o-{n}") for n in range(3)]
        wait_until(lambda: all("deferred" in house.happened(a) for a in action_ids), 20, "all are deferred")
        assert house.puts() == {}
        house.store.set_admission(True, "done", actor="ops")
        house.ends(*action_ids)
    assert house.puts() == {"o-0": 1, "o-1": 1, "o-2": 1}


def test_a_process_killed_in_its_mutation_is_found_by_looking(houses: Houses) -> None:
    house = houses()
    with house.tasks.worker():
        action_id = house.approved("o-1", "kill")
        house.ends(action_id)
    assert house.puts() == {"o-1": 1}
    happened = house.happened(action_id)
    assert happened.count("dispatched") == 1
    assert "observing" in happened


def test_a_whole_worker_killed_in_its_mutation_is_replaced_by_another(houses: Houses) -> None:
    house = houses()
    worker = house.tasks.worker().start()
    action_id = house.approved("o-1", "hang")
    wait_until(house.puts, 20, "the endpoint is asked")
    worker.kill()  # its message stays invisible on the broker, for an hour
    (digest,) = [digest for _, digest in house.lines("puts")]
    house.tasks.path(digest).touch()  # the endpoint had it, and pays
    with house.tasks.worker():
        house.ends(action_id)
    assert house.puts() == {"o-1": 1}


def test_an_answer_that_never_comes_ends_ambiguous_and_the_errback_is_told(houses: Houses) -> None:
    house = houses()
    with house.tasks.worker():
        action_id = house.approved("o-1", "lose", link_error=house.app.tasks[f"{house.tasks.name}.oh_no"].s())
        wait_until(lambda: len(house.lines("looks")) >= 2, 20, "it is looked for")
        assert house.state(action_id) == "dispatched"
        house.ends(action_id, state="failed", within=90)
        wait_until(lambda: house.lines("oh_no"), 20, "the errback is told")
    assert house.lines("oh_no") == [["ActionFailed"]]
    assert house.store.get_action(action_id)["result"]["status"] == "ambiguous"
    assert house.puts() == {"o-1": 1}


@pytest.mark.parametrize("mode", ["enforce", "observe", "off"])
def test_every_message_delivered_twice_makes_one_mutation_each(houses: Houses, mode: str) -> None:
    house = houses(TWICE, idempotency_mode=mode)
    ways = ["pay", "silence"] * 5
    with house.tasks.worker(concurrency=4):
        action_ids = [house.approved(f"o-{n}", way) for n, way in enumerate(ways)]
        house.ends(*action_ids, within=60)
    assert house.puts() == {f"o-{n}": 1 for n in range(10)}


def test_a_step_of_a_replaced_chain_is_dropped(houses: Houses) -> None:
    house = houses(governed_sweep_interval=0)
    action_id = house.approved("o-1")
    assert house.store.replace_chain(action_id, house.store.get_action(action_id)["chain_id"], "another")
    house.store.set_admission(False, "so that it would have to wait", actor="ops")
    with house.tasks.worker():
        wait_until(lambda: house.lines("ran"), 20, "the old chain's message is taken")
        (ran,) = house.lines("ran")
        assert ran[:2] == ["dispatch", "IGNORED"]
        house.store.set_admission(True, "now", actor="ops")
        governed_chain(action_id, "another", house.app).apply_async()
        house.ends(action_id)
    assert house.puts() == {"o-1": 1}


@pytest.mark.parametrize("pool", ["prefork", "gevent", "threads"])
def test_a_worker_that_sweeps_keeps_no_connection_and_ends_at_once(
    houses: Houses, postgres_server: PostgresServer, pool: str
) -> None:
    house = houses(governed_sweep_interval=0.2)
    name = house.url.rpartition("/")[2]
    house.approved("o-1")
    redis.Redis.from_url(house.tasks.broker).flushdb()
    with house.tasks.worker(pool=pool, concurrency=2, queues=["elsewhere"]) as worker:
        (action,) = house.store.find()
        swept = lambda: house.happened(action["action_id"]).count("enqueued") >= 2  # noqa: E731
        wait_until(swept, 30, "it sweeps")
        house.store.close()
        open_now = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}'"
        wait_until(lambda: postgres_server.execute(open_now).strip() == "0", 20, "no connection is open between sweeps")
        began = time.monotonic()
        assert worker.term() == 0
        assert time.monotonic() - began < 15
        assert "Traceback" not in worker.log


def test_the_sweep_survives_its_database(houses: Houses, private_postgres: PostgresServer) -> None:
    house = houses()
    url = private_postgres.create_database()
    with SQLActionStore(url) as made:
        made.create_schema()
    other = House(house.tasks.broker, url, "memory://", governed_sweep_interval=0.2, governed_store_timeout=1)
    try:
        with other.tasks.worker(queues=["elsewhere"]) as worker:
            private_postgres.stop()
            worker.wait_log("are not looked after now", 30)
            private_postgres.start()
            worker.wait_log("are looked after again", 30)
            assert worker.log.count("are not looked after now") == 1
    finally:
        other.close()
