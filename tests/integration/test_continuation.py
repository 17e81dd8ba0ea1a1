"""Real workers, killed in every window between a body's end and the ack: each canvas goes on, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, chord, group

from celery_idem import ReplayImpossible
from celery_idem.stores.base import open_store
from tests.support.workers import TaskApp, wait_until

pytestmark = [pytest.mark.redis, pytest.mark.postgres, pytest.mark.rabbitmq]
PAIRS = ["redis+redis", "rabbitmq+postgres"]

SOURCE = """
import os, signal, time
from pathlib import Path
from celery import Task, group
from celery.signals import task_postrun, worker_process_init
from celery_idem import IdempotentTask, Policy
from celery_idem.app import runtime_of

HERE = Path(__file__).parent

def write(name, *words):
    with open(HERE / name, "a") as f:
        f.write(" ".join(map(str, words)) + "\\n")

def once(name):
    try:
        os.close(os.open(HERE / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def die(window, message_id):
    if (HERE / f"kill-{window}").exists() and once(f"killed-{window}-{message_id}"):
        os.kill(os.getpid(), signal.SIGKILL)
    if (HERE / f"stop-{window}").exists() and once("stopped"):
        deadline = time.monotonic() + 60
        while not (HERE / "go-on").exists() and time.monotonic() < deadline:
            time.sleep(0.01)

runtime_of(app).emit.listeners.append(lambda event: write("events", event.name.value, event.fields["message_id"]))

def around(owner, name, before, after, mine):
    inner = getattr(owner, name)
    def call(*args, **kwargs):
        who = mine(*args, **kwargs)
        if who is not None:
            die(before, who)
        try:
            return inner(*args, **kwargs)
        finally:
            if who is not None:
                die(after, who)
    setattr(owner, name, call)

def of_request(request):
    return request.id if request is not None and getattr(request, "task", None) == head.name else None

@worker_process_init.connect(weak=False)
def patch(**_):
    done = lambda claim, *a, **k: claim.operation.delivery.message_id if claim.operation.task == head.name else None
    around(runtime_of(app).store, "complete", "completion", "publish", done)
    kind = type(app.backend)
    result = lambda self, task_id, value, request=None, *a, **k: of_request(request)
    around(kind, "mark_as_done", "result", "never", result)
    around(kind, "on_chord_part_return", "part", "settle", lambda self, request, *a, **k: of_request(request))

@task_postrun.connect(weak=False)
def over(task=None, task_id=None, **_):
    if task.name == head.name:
        die("ack", task_id)

@app.task(base=IdempotentTask, bind=True)
def head(self, n):
    write("runs", "head", n)
    return n

@app.task(base=IdempotentTask)
def down(value, name):
    write("runs", "down", name)
    deadline = time.monotonic() + 30
    while (HERE / f"hold-{name}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return value

@app.task(base=Task)
def plain(value, name):
    write("runs", "plain", name)
    return value

@app.task(base=IdempotentTask, bind=True, idempotency=Policy(key="order:{order}"))
def charge(self, order):
    write("runs", "charge", order)
    time.sleep(0.3)
    return order

@app.task(base=IdempotentTask, bind=True)
def fail(self, n):
    write("runs", "fail", n)
    time.sleep(0.2)
    raise ValueError("declined")

@app.task(base=IdempotentTask)
def hear(request, exc, traceback):
    write("runs", "hear", request.id)

@app.task(base=IdempotentTask)
def told(failed):
    write("runs", "told", failed)

@app.task(base=IdempotentTask, bind=True)
def replaced(self, n):
    write("runs", "replaced", n)
    if (HERE / "killed").exists():
        (HERE / "hold-a").unlink()
    try:
        self.replace(group(down.s(1, "a"), down.s(2, "b")) | down.s("sum"))
    finally:
        if once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)

@app.task(base=IdempotentTask, bind=True, idempotency=Policy(key="arguments"))
def replaces_itself(self, n):
    if not self.request.replaced_task_nesting:
        return self.replace(replaces_itself.si(n))
    return n

@app.task(base=IdempotentTask, bind=True)
def adds(self, n):
    write("runs", "adds", n)
    self.add_to_chord(down.si(10, "added"))
    if (HERE / "kill-adds").exists() and once("killed-adds"):
        os.kill(os.getpid(), signal.SIGKILL)
    return n

@app.task(base=Task)
def total(values):
    write("runs", "total", sorted(values))
    return sorted(values)
"""


class Canvases:
    """A ``TaskApp`` of ``SOURCE``, and what its bodies and events wrote."""

    def __init__(self, broker: str, store: str, backend: str | None, **settings: Any) -> None:
        settings["idempotency_store"] = store
        self.tasks = TaskApp(SOURCE, broker=broker, backend=backend, settings=settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tasks.module, name)

    def runs(self, task: str | None = None) -> Counter[str]:
        """How often each body ran with each argument; of one task alone if given."""
        path = self.tasks.path("runs")
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(line for line in lines if task is None or line.split()[0] == task)

    def events(self, name: str) -> int:
        """How often the workers told this event."""
        path = self.tasks.path("events")
        return sum(line.split()[0] == name for line in path.read_text().splitlines()) if path.exists() else 0

    def ids_told(self, name: str) -> list[str]:
        """Ids of the messages this event was told of, in order."""
        lines = self.tasks.path("events").read_text().splitlines()
        return [line.split()[1] for line in lines if line.split()[0] == name]

    def kill(self, window: str) -> None:
        """Have every head's child killed in this window, once per message."""
        self.tasks.path(f"kill-{window}").touch()

    def killed(self) -> int:
        """How many children were."""
        return len(list(self.tasks.dir.glob("killed*")))

    def twice(self, canvas: Any) -> Any:
        """Publish a canvas, and the message of its first task once more."""
        frozen = canvas.clone()
        result = frozen.freeze()
        frozen.apply_async()
        frozen.apply_async()
        return result


@pytest.fixture(params=PAIRS)
def canvases(request: Any) -> Iterator[Canvases]:
    """Redis for everything, or RabbitMQ and PostgreSQL with results in SQLite."""
    if request.param == "redis+redis":
        server = request.getfixturevalue("redis_server")
        places = (server.new_database(), server.new_database(), server.new_database())
    else:
        places = (request.getfixturevalue("amqp_url"), prepared(request.getfixturevalue("postgres_url")), None)
    made = Canvases(*places)
    yield made
    made.tasks.close()


def prepared(url: str) -> str:
    store = open_store(url, timeout=30)
    store.create_schema()
    store.close()
    return url


# --- crash windows --------------------------------------------------------------------------------


@pytest.mark.crash
@pytest.mark.parametrize("window", ["completion", "publish", "result", "part", "settle", "ack"])
def test_a_child_killed_in_any_window_continues_chain_link_and_chord_once(canvases: Canvases, window: str) -> None:
    canvases.kill(window)
    header = [
        chain(canvases.head.s(1), canvases.down.s("step")),
        canvases.head.s(2).set(link=canvases.down.s("link")),
        canvases.head.s(3).set(link=group(canvases.down.s("left"), canvases.down.s("right"))),
    ]
    with canvases.tasks.worker(concurrency=2):
        result = chord(header, canvases.total.s()).apply_async()
        assert result.get(timeout=90) == [1, 2, 3]
        names = ["step", "link", "left", "right"]
        wait_until(lambda: len(canvases.runs("down")) == len(names), 30, "every link")
        wait_until(lambda: canvases.events("REPLAYED") >= 1 or window == "completion", 30, "a replay")
        again = Counter({f"head {n}": 2 if window == "completion" else 1 for n in (1, 2, 3)})
        expected = again + Counter(f"down {name}" for name in names) + Counter(["total [1, 2, 3]"])
        assert canvases.runs() == expected
    assert canvases.killed() == (2 if window in {"part", "settle"} else 3)


def test_a_worker_frozen_between_completion_and_publishing_publishes_late_under_the_same_id(redis_server: Any) -> None:
    """Not covered: what stood still beyond its lease has published nothing yet, and does so when it goes on."""
    places = [redis_server.new_database() for _ in range(3)]
    canvases = Canvases(*places, idempotency_lease=6.0, idempotency_store_timeout=1.5)
    try:
        canvases.tasks.path("stop-publish").touch()
        heads = canvases.head.s(1).set(link=[canvases.down.s("step"), canvases.plain.s("step")], task_id="M")
        frozen = canvases.tasks.worker(concurrency=1).start()
        heads.apply_async()
        wait_until(lambda: canvases.tasks.path("stopped").exists(), 20, "the completion")
        frozen.pause()
        canvases.tasks.path("go-on").touch()
        with canvases.tasks.worker(concurrency=1):
            heads.apply_async()
            wait_until(lambda: canvases.runs("plain") == Counter(["plain step"]), 40, "the copy's links")
            wait_until(lambda: canvases.runs("down"), 20, "both of them")
            frozen.resume()
            wait_until(lambda: canvases.runs("plain")["plain step"] == 2, 40, "the links once more")
            (step,) = set(canvases.ids_told("NEW")) - {"M"}
            wait_until(lambda: step in canvases.ids_told("REPLAYED"), 30, "the idempotent link to replay")
        assert canvases.runs() == Counter({"head 1": 1, "down step": 1, "plain step": 2})
    finally:
        canvases.tasks.close()


# --- no crash at all ------------------------------------------------------------------------------


def test_ten_chains_whose_heads_come_twice_run_the_plain_step_ten_times(canvases: Canvases) -> None:
    with canvases.tasks.worker(concurrency=3):
        results = [canvases.twice(chain(canvases.head.s(n), canvases.plain.s(n))) for n in range(10)]
        assert [result.get(timeout=60) for result in results] == list(range(10))
        wait_until(lambda: canvases.events("REPLAYED") == 10, 60, "every copy to be replayed")
        wait_until(lambda: canvases.events("NEW") == 10, 30, "every head")
    assert canvases.runs("plain") == Counter(f"plain {n}" for n in range(10))


def test_ten_messages_with_a_link_that_come_twice_run_the_plain_link_ten_times(canvases: Canvases) -> None:
    with canvases.tasks.worker(concurrency=3):
        for n in range(10):
            canvases.twice(canvases.head.s(n).set(link=canvases.plain.s(n)))
        wait_until(lambda: canvases.events("REPLAYED") == 10, 60, "every copy to be replayed")
        wait_until(lambda: len(canvases.runs("plain")) == 10, 30, "every link")
    assert canvases.runs("plain") == Counter(f"plain {n}" for n in range(10))


def test_two_messages_of_one_key_continue_their_own_chains_once_each(canvases: Canvases) -> None:
    with canvases.tasks.worker(concurrency=3):
        results = [canvases.twice(chain(canvases.charge.s(7), canvases.plain.s(name))) for name in ("a", "b")]
        assert [result.get(timeout=60) for result in results] == [7, 7]
        wait_until(lambda: canvases.events("REPLAYED") == 3, 60, "every other copy to be replayed")
    assert canvases.runs() == Counter(["charge 7", "plain a", "plain b"])


# --- failures -------------------------------------------------------------------------------------


def test_errbacks_of_a_message_that_comes_twice_are_told_once(canvases: Canvases) -> None:
    errbacks = [canvases.hear.s(), canvases.told.s()]
    with canvases.tasks.worker(concurrency=2):
        call = canvases.fail.s(1).set(link_error=errbacks, task_id="M")
        last = chain(call, canvases.plain.s("never")).apply_async()
        call.apply_async()
        wait_until(lambda: canvases.events("OVER") == 1, 30, "the copy to be dropped")
        with pytest.raises(ValueError, match="declined"):
            last.get(timeout=30)
        wait_until(lambda: len(canvases.runs("told")) == 1, 30, "the published errback")
    assert canvases.runs() == Counter(["fail 1", "hear M", "told M"])


def test_a_chord_with_a_failing_member_fails_once(canvases: Canvases) -> None:
    body = canvases.total.s().on_error(canvases.told.s())
    with canvases.tasks.worker(concurrency=2):
        header = [canvases.head.s(1), canvases.fail.s(2).set(task_id="M")]
        result = chord(header, body).apply_async(task_id="body")
        wait_until(lambda: result.state == "FAILURE", 60, "the chord to fail")
        canvases.fail.s(2).set(task_id="M").apply_async()
        wait_until(lambda: canvases.events("OVER") == 1, 30, "the copy to be dropped")
        wait_until(lambda: len(canvases.runs("told")) == 1, 30, "the errback")
    assert canvases.runs() == Counter(["head 1", "fail 2", "told body"])


# --- replace and add_to_chord ---------------------------------------------------------------------


@pytest.mark.crash
def test_a_body_killed_after_it_published_its_replacement_runs_nothing_inside_twice(canvases: Canvases) -> None:
    canvases.tasks.path("hold-a").touch()  # else the replacement may end first, and Celery takes that for the end
    with canvases.tasks.worker(concurrency=2):
        result = chain(canvases.replaced.s(1), canvases.down.s("next")).apply_async()
        assert result.get(timeout=90) == [1, 2]
        assert result.parent.get(timeout=30) == [1, 2]
        wait_until(lambda: canvases.events("REPLAYED") >= 2, 30, "what it published again to be replayed")
    expected = Counter(["replaced 1", "replaced 1", "down a", "down b", "down sum", "down next"])
    assert canvases.runs() == expected


def test_a_chord_of_two_equal_members_that_replace_themselves_does_not_hang(canvases: Canvases) -> None:
    with canvases.tasks.worker(concurrency=2):
        result = chord([canvases.replaces_itself.s(1), canvases.replaces_itself.s(1)], canvases.total.s()).apply_async()
        wait_until(lambda: result.state == "FAILURE", 60, "the chord to fail")
        assert ReplayImpossible.__name__ in repr(result.result)


@pytest.mark.crash
@pytest.mark.parametrize("killed", [False, True])
def test_a_body_that_adds_to_its_chord(redis_server: Any, killed: bool) -> None:
    """A run that died added its task too: both run and both count. A replay adds nothing."""
    canvases = Canvases(*(redis_server.new_database() for _ in range(3)))
    try:
        if killed:
            canvases.kill("adds")
        with canvases.tasks.worker(concurrency=2):
            call = canvases.adds.s(1).set(task_id="M")
            result = chord([call, canvases.head.s(2)], canvases.total.s()).apply_async()
            added = [10, 10] if killed else [10]
            assert result.get(timeout=60) == [1, 2, *added]
            call.apply_async()
            wait_until(lambda: canvases.events("REPLAYED") == 1, 30, "the copy to be replayed")
        assert canvases.runs("down") == Counter({"down added": len(added)})
        assert canvases.runs("adds") == Counter({"adds 1": len(added)})
    finally:
        canvases.tasks.close()
