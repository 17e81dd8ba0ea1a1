"""The runbook, docs/how-to/operate.md, done on real workers and stores: what each step says is what happens."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_idem import DeliveriesExhausted, cli
from celery_idem.governed import SQLActionStore
from celery_idem.governed.chain import governance_of
from celery_idem.stores.base import open_store
from tests.support.services import PostgresServer, RedisServer
from tests.support.workers import TaskApp, WorkerProc, wait_until

pytestmark = pytest.mark.redis

HEAD = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def write(name, *words):
    with open(HERE / name, "a") as f:
        f.write(" ".join(map(str, words)) + "\\n")

def wait_for(name):
    deadline = time.monotonic() + 60
    while not (HERE / name).exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} never came")
        time.sleep(0.01)
"""
SOURCE = f"""{HEAD}
from celery_idem import IdempotentTask, Policy
from celery_idem.app import runtime_of

runtime_of(app).emit.listeners.append(lambda event: write("events", event.name.value))

@app.task(name="pay", base=IdempotentTask, bind=True, idempotency=Policy(key="order:{{order}}"))
def pay(self, order, go="go"):
    write("runs", order, self.idempotency.attempt, self.idempotency.fence)
    wait_for(go)
    return f"paid {{order}}"
"""
PLAIN = f"""{HEAD}
@app.task(name="pay", bind=True)
def pay(self, order, go="go"):
    write("runs", order, 0, 0)
    wait_for(go)
    return f"paid {{order}}"
"""


REFUNDS = f"""{HEAD}
from celery_idem.governed import SQLActionStore, action, approve, propose
from pydantic import BaseModel

class Refund(BaseModel):
    order: int

@action("till.refund", payload=Refund)
class RefundEndpoint:
    def execute(self, request):
        write("refunds", request.payload["order"])
        return request.completed()

    def observe(self, request):
        return request.completed()

def approved(order):
    proposed = propose("till.refund", {{"order": order}}, idempotency_key=f"refund:{{order}}", app=app)
    return approve(proposed["action_id"], principal="ann@example.org", app=app)["action_id"]
"""


class Till(TaskApp):
    """An app of one task, and an operator beside it."""

    def pay(self, order: int, **options: Any) -> Any:
        return self.module.pay.apply_async((order,), **options)

    def idem(self, *words: str, exit_code: int = 0) -> str:
        """What ``celery idem`` prints; as processes of their own the commands are tested in ``test_cli.py``."""
        obj = CLIContext(app=self.app, no_color=True, workdir=None)
        done = CliRunner().invoke(cli.idem, words, obj=obj, prog_name="idem")
        assert done.exit_code == exit_code, done.output
        return done.output

    def records(self, *words: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.idem("list", "--json", *words))["records"]
        return found

    def lines(self, name: str) -> list[list[str]]:
        path = self.path(name)
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def runs(self, order: int) -> list[tuple[int, int]]:
        """Attempt and fence of each body of this order that began."""
        return [(int(attempt), int(fence)) for told, attempt, fence in self.lines("runs") if int(told) == order]

    def began(self, order: int, times: int = 1) -> None:
        wait_until(lambda: len(self.runs(order)) == times, 40, f"body {times} of order {order}")

    def told(self, event: str) -> None:
        wait_until(lambda: [event] in self.lines("events"), 40, event)


@pytest.fixture
def make(redis_server: RedisServer) -> Iterator[Callable[..., Till]]:
    made: list[Till] = []
    broker, results = redis_server.new_database(), redis_server.new_database()

    def till(source: str = SOURCE, *, store: str | None = None, **settings: Any) -> Till:
        url = store or redis_server.new_database()
        made.append(Till(source, broker=broker, backend=results, settings={"idempotency_store": url, **settings}))
        return made[-1]

    yield till
    for app in made:
        app.close()


def statement(url: str, text: str) -> None:
    engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(text))
    engine.dispose()


def terminate(worker: WorkerProc) -> None:
    """What Kubernetes sends first."""
    worker._running.send(signal.SIGTERM)


def gone(worker: WorkerProc) -> None:
    wait_until(lambda: not worker.alive, 40, f"{worker.name} to end")


def give_back(till: Till) -> None:
    """Have Redis give back what a killed worker held, without waiting for the visibility timeout."""
    with till.app.connection_for_write(transport_options={"visibility_timeout": 0}) as connection:
        connection.default_channel.qos.restore_visible(interval=1)


def states(store: SQLActionStore, actions: list[str], state: str) -> None:
    wait_until(lambda: all(store.get_action(a)["state"] == state for a in actions), 40, state)


def told_of(store: SQLActionStore, action_id: str) -> set[str]:
    return {event["event_type"] for event in store.list_events(action_id)}


# --- a stuck key -----------------------------------------------------------------------------------------------------


def test_a_stuck_key_is_found_refused_and_forgotten_by_force(make: Any) -> None:
    till = make(idempotency_lease=600)
    with till.worker() as stuck:
        lost = till.pay(1)
        till.began(1)
        stuck.pause()
        (claimed,) = till.records("--state", "claimed", "--older-than", "0")
        assert claimed["holder"]["provably_dead"] is False
        key = claimed["key"]
        assert "held by" in till.idem("show", key)
        assert "use --force" in till.idem("forget", key, "--yes", exit_code=1)
        assert "forgotten" in till.idem("forget", key, "--yes", "--force")
        till.path("go").touch()
        with till.worker():
            assert till.pay(1).get(timeout=30) == "paid 1"
            stuck.resume()
            assert lost.get(timeout=30) == "paid 1"
    assert len(till.runs(1)) == 2
    (record,) = till.records()
    assert (record["state"], record["fence"]) == ("COMPLETED", till.runs(1)[1][1])


# --- deploys ---------------------------------------------------------------------------------------------------------


def test_a_task_that_deploys_killed_too_often_runs_again_once_it_is_forgotten(make: Any) -> None:
    till = make(idempotency_max_deliveries=1)
    till.pay(1, task_id="M")
    with till.worker() as worker:
        till.began(1)
        worker.kill()  # the grace period was over
    assert till.records("--state", "claimed")[0]["holder"]["provably_dead"] is True
    assert "(dead)" in till.idem("list", "--state", "claimed")
    give_back(till)
    till.path("go").touch()
    with till.worker():
        with pytest.raises(DeliveriesExhausted):
            till.module.pay.AsyncResult("M").get(timeout=30)
        assert till.records()[0]["outcome"]["kind"] == "FAILURE"
        with pytest.raises(DeliveriesExhausted):
            till.pay(1).get(timeout=30)
        till.idem("forget", "--task", "pay", "--args", "[1]", "--yes")
        assert till.pay(1).get(timeout=30) == "paid 1"
    till.told("EXHAUSTED")
    assert [attempt for attempt, _ in till.runs(1)] == [1, 1]


def test_a_pod_that_is_told_to_go_gives_its_task_back_and_no_death_is_counted(make: Any) -> None:
    till = make(idempotency_max_deliveries=1, worker_soft_shutdown_timeout=1.0)
    till.pay(1, task_id="M")
    with till.worker(env={"REMAP_SIGTERM": "SIGQUIT"}) as worker:
        till.began(1)
        terminate(worker)
        worker.wait_log("Initiating Soft Shutdown")
        gone(worker)
    give_back(till)
    till.path("go").touch()
    with till.worker():
        assert till.module.pay.AsyncResult("M").get(timeout=30) == "paid 1"
    assert [attempt for attempt, _ in till.runs(1)] == [1, 1]


# --- switching it off ------------------------------------------------------------------------------------------------


def test_switched_off_a_parked_message_runs_unprotected_and_switched_on_again_it_is_remembered(make: Any) -> None:
    till = make(idempotency_wait_timeout=0)
    with till.worker(concurrency=2) as worker:
        first = till.pay(1)
        till.began(1)
        waiting = till.pay(1)
        till.told("PARKED")
        terminate(worker)
        worker.wait_log("Warm shutdown")
        till.path("go").touch()
        gone(worker)
    assert first.get(timeout=30) == "paid 1"
    give_back(till)
    with till.worker(env={"CELERY_IDEMPOTENCY_MODE": "off"}) as worker:
        assert waiting.get(timeout=40) == "paid 1"
        assert till.pay(1).get(timeout=30) == "paid 1"
        assert "mode is off: duplicates run" in worker.log
    assert len(till.runs(1)) == 3
    with till.worker():
        assert till.pay(1).get(timeout=30) == "paid 1"
    assert len(till.runs(1)) == 3


def test_an_app_without_celery_idem_runs_what_was_stamped(make: Any) -> None:
    till = make()
    sent = [till.pay(1), till.pay(1)]
    plain = make(PLAIN, task_default_queue=till.queue)
    plain.path("go").touch()
    with plain.worker():
        assert [result.get(timeout=30) for result in sent] == ["paid 1"] * 2
    assert len(plain.runs(1)) == 2
    assert till.records() == []


# --- a store that lost writes, and backups ---------------------------------------------------------------------------


@pytest.mark.postgres
def test_a_table_that_is_away_for_a_while_is_an_outage_and_fails_no_task(
    make: Any, postgres_server: PostgresServer
) -> None:
    """As a restore, a migration or a revoked right has it: a body that ended, and a message that came meanwhile."""
    url = postgres_server.create_database()
    with closing(open_store(url, timeout=30)) as store:
        store.create_schema()
    till = make(store=url, idempotency_lease=5, idempotency_store_timeout=0.5)
    with till.worker(concurrency=2):
        first = till.pay(1)
        till.began(1)
        statement(url, "ALTER TABLE celery_idem_record RENAME TO away")
        (till.path("go")).touch()
        second = till.pay(2)
        till.told("COMPLETE_FAILED")
        till.told("PARKED")
        statement(url, "ALTER TABLE away RENAME TO celery_idem_record")
        assert first.get(timeout=60) == "paid 1"
        assert second.get(timeout=60) == "paid 2"
        till.told("COMPLETED_LATE")
        assert till.pay(1).get(timeout=60) == "paid 1"
        assert (len(till.runs(1)), len(till.runs(2))) == (1, 1)


def test_after_a_failover_that_lost_writes_a_claim_is_restored_and_a_completion_is_not(make: Any) -> None:
    till = make(idempotency_lease=6.0, idempotency_store_timeout=1.0)
    url = till.app.conf.idempotency_store
    with till.worker(concurrency=2), closing(redis.Redis.from_url(url)) as store:
        till.path("early").touch()
        assert till.module.pay.delay(2, "early").get(timeout=30) == "paid 2"
        running = till.pay(1)
        till.began(1)
        store.flushdb()  # what an asynchronous replica never got
        wait_until(lambda: len(store.keys("*")) == 1, 20, "the claim to be renewed")
        (restored,) = till.records("--state", "claimed")
        assert restored["fence"] == till.runs(1)[0][1]
        assert till.module.pay.delay(2, "early").get(timeout=30) == "paid 2"
        till.path("go").touch()
        assert running.get(timeout=30) == till.pay(1).get(timeout=30) == "paid 1"
    assert len(till.runs(1)) == 1
    (_, before), (_, after) = till.runs(2)
    assert after > before


def test_a_restored_backup_forgets_what_came_after_it_and_fences_go_on_growing(make: Any, tmp_path: Path) -> None:
    place, backup = tmp_path / "idem.db", tmp_path / "backup.db"
    till = make(store=f"sqlite:///{place}")
    till.path("go").touch()
    with till.worker():
        assert till.pay(1).get(timeout=30) == "paid 1"
        with closing(sqlite3.connect(place)) as source, closing(sqlite3.connect(backup)) as target:
            source.backup(target)  # beside a running worker
        assert till.pay(2).get(timeout=30) == "paid 2"
    for left in tmp_path.glob("idem.db*"):
        left.unlink()
    backup.rename(place)
    assert [record["state"] for record in till.records()] == ["COMPLETED"]
    with till.worker():
        assert [till.pay(order).get(timeout=30) for order in (1, 2)] == ["paid 1", "paid 2"]
    assert len(till.runs(1)) == 1
    (_, before), (_, after) = till.runs(2)
    assert after > before


def test_a_restored_ledger_dispatches_again_what_it_forgot_unless_admission_is_closed_first(
    make: Any, tmp_path: Path
) -> None:
    place, backup = tmp_path / "actions.db", tmp_path / "backup.db"
    url = f"sqlite:///{place}"
    often = {"governed_sweep_interval": 0.5, "governed_sweep_grace": 0.5}
    till = make(REFUNDS, store=url, governed_store=url, **often)
    with closing(SQLActionStore(url)) as store:
        store.create_schema()
        one, two = till.module.approved(1), till.module.approved(2)
        with closing(sqlite3.connect(place)) as source, closing(sqlite3.connect(backup)) as target:
            source.backup(target)
        with till.worker():
            states(store, [one, two], "completed")
    governance_of(till.app).close()
    for left in tmp_path.glob("actions.db*"):
        left.unlink()
    backup.rename(place)
    with closing(SQLActionStore(url)) as store:
        store.set_admission(False, "restored", actor="bob@example.org")
        with till.worker():
            for action_id in (one, two):
                wait_until(lambda a=action_id: "deferred" in told_of(store, a), 30, "the sweep to find both")
            assert sorted(till.lines("refunds")) == [["1"], ["2"]]
            store.reject(one, "done before the backup was restored", actor="bob@example.org")
            store.set_admission(True, "looked at", actor="bob@example.org")
            states(store, [two], "completed")
    assert sorted(till.lines("refunds")) == [["1"], ["2"], ["2"]]
