"""An application with every kind of Celery task, written as if no idempotency existed.

``TaskApp`` writes its own lines, which make ``app``, in front of this file. Everything an observer can see of a task
goes to the file ``seen``, one JSON object a line: bodies, hooks, signals, and the whole request.
"""

import functools
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from celery import Celery, Task, chain, current_task, group, shared_task, signals
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from kombu import Exchange, Queue
from kombu.common import Broadcast
from pydantic import BaseModel

app: Celery = globals()["app"]
HERE = Path(__file__).parent

main = app.conf.task_default_queue
app.conf.update(
    task_queues=[Queue(main, Exchange(main), main), Broadcast(f"{main}.news")],
    task_default_exchange=main,
    task_default_routing_key=main,
    task_routes={"mixed.news": {"queue": f"{main}.news"}},
    task_annotations=(
        *(app.conf.task_annotations or ()),
        {"mixed.annotated": {"rate_limit": "500/m", "max_retries": 7}},
    ),
    beat_schedule={"every-day": {"task": f"{app.main}.shared", "schedule": timedelta(days=1), "args": (21,)}},
    result_extended=True,
    result_chord_retry_interval=0.2,
    task_send_sent_event=True,
    worker_send_task_events=True,
)


# --- what observers see ---------------------------------------------------------------------------


def saw(kind: str, request: Any, /, **more: Any) -> None:
    facts = {"kind": kind, "id": request.id, "root_id": request.root_id, "parent_id": request.parent_id}
    line = json.dumps({**facts, "retries": request.retries, **more}, default=repr)
    with (HERE / "seen").open("a") as file:
        file.write(line + "\n")


def ran() -> None:
    """Every body says that it runs."""
    saw("body", current_task.request, task=current_task.name)


def ours(sender: Any) -> bool:
    return getattr(getattr(sender, "app", None), "main", None) == app.main


@signals.task_prerun.connect
def prerun(sender: Any = None, task: Any = None, args: Any = None, kwargs: Any = None, **_: Any) -> None:
    if ours(sender):
        saw("prerun", task.request, task=task.name, args=args, kwargs=kwargs, request=vars(task.request))


@signals.task_postrun.connect
def postrun(sender: Any = None, task: Any = None, state: Any = None, retval: Any = None, **_: Any) -> None:
    if ours(sender):
        children = [child.id for child in task.request.children or ()]
        saw("postrun", task.request, state=state, retval=repr(retval), children=children)


@signals.task_success.connect
def success(sender: Any = None, result: Any = None, **_: Any) -> None:
    if ours(sender):
        saw("success", sender.request, result=repr(result))


@signals.task_failure.connect
def failure(sender: Any = None, exception: Any = None, args: Any = None, **_: Any) -> None:
    if ours(sender):
        saw("failure", sender.request, exception=repr(exception), args=args)


@signals.task_retry.connect
def retried(sender: Any = None, request: Any = None, reason: Any = None, **_: Any) -> None:
    if ours(sender):
        saw("retry", request, reason=str(reason))


@signals.before_task_publish.connect
def publishing(sender: Any = None, headers: Any = None, body: Any = None, **info: Any) -> None:
    if main in f"{info['exchange']} {info['routing_key']}":
        ids = {key: headers[key] for key in ("id", "root_id", "parent_id", "retries")}
        wire = {"headers": headers, "exchange": info["exchange"], "routing_key": info["routing_key"]}
        saw("publish", SimpleNamespace(**ids), task=sender, body=body, properties=info["properties"], **wire)


class Hooked(Task):
    """Every hook a task has."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        saw("before_start", self.request, args=args, kwargs=kwargs)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        saw("on_success", self.request, retval=retval)

    def on_failure(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        saw("on_failure", self.request, exc=repr(exc))

    def on_retry(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        saw("on_retry", self.request, exc=repr(exc))

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        saw("after_return", self.request, status=status, retval=repr(retval))


# --- the ways to make one -------------------------------------------------------------------------


@app.task
def add(x: int, y: int) -> int:
    ran()
    return x + y


@shared_task(name=f"{app.main}.shared")
def shared(x: int) -> int:
    ran()
    return x * 2


class Pay(Task):
    name = "mixed.Pay"

    def __init__(self) -> None:
        self.paid = 0

    def run(self, amount: int) -> str:
        ran()
        self.paid += amount
        return f"paid {amount}"


pay = app.register_task(Pay())


class Audited(Task):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        saw("audited", self.request)
        return super().__call__(*args, **kwargs)


class Tagging(Task):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ["tagged", self.run(*args, **kwargs)]


class Defaulting(Task):
    """Sends every message with options of its own."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        options.setdefault("task_id", f"own-{args[0]}-{options.get('retries', 0)}")
        options.setdefault("link", add.si(1, 1))
        return super().apply_async(args, kwargs, **options)


@app.task(base=Audited)
def audited(x: int) -> int:
    ran()
    return x


@app.task(base=Tagging)
def tagged(x: int) -> int:
    ran()
    return x


@app.task(base=Defaulting, bind=True)
def defaulting(self: Any, x: str) -> str:
    ran()
    return f"{x} {self.request.id}"


class Order(BaseModel):
    number: int


@app.task(pydantic=True)
def model(order: Order) -> Order:
    ran()
    return Order(number=order.number + 1)


def doubled(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return 2 * function(*args, **kwargs)

    return run


@app.task
@doubled
def decorated(x: int) -> int:
    ran()
    return x


@app.task(name="billing.named-by-hand")
def named(x: int) -> int:
    ran()
    return x


# --- options --------------------------------------------------------------------------------------


@app.task(bind=True, base=Hooked, autoretry_for=(OSError,), retry_backoff=1, retry_jitter=False, max_retries=2)
def flaky(self: Any) -> str:
    ran()
    if self.request.retries == 0:
        raise OSError("down")
    return "up"


@app.task(base=Hooked)
def hooked(x: int) -> float:
    ran()
    return 10 / x


@app.task(bind=True, track_started=True)
def tracked(self: Any) -> str:
    ran()
    return self.AsyncResult(self.request.id).state


@app.task(ignore_result=True)
def ignored() -> int:
    ran()
    return 1


@app.task(ignore_result=True)
def unsayable() -> object:
    ran()
    return object()


@app.task(acks_late=True)
def late_ack() -> str:
    ran()
    return "late"


@app.task(acks_late=False)
def early_ack() -> str:
    ran()
    return "early"


@app.task(throws=(KeyError,))
def throwing() -> None:
    ran()
    raise KeyError("expected")


@app.task(rate_limit="1000/m", expires=3600)
def limited() -> str:
    ran()
    return "limited"


@app.task(soft_time_limit=3)
def slow() -> str:
    ran()
    try:
        time.sleep(30)
    except SoftTimeLimitExceeded:
        return "cut short"
    return "not cut"


@app.task(name="mixed.annotated")
def annotated() -> str:
    ran()
    return f"{annotated.rate_limit} {annotated.max_retries}"


# --- what a body may do ---------------------------------------------------------------------------


@app.task(bind=True, base=Hooked, max_retries=3)
def retry_changed(self: Any, x: int) -> int:
    ran()
    if x < 2:
        raise self.retry(args=(x + 1,), countdown=0)
    return x


@app.task(bind=True, base=Hooked)
def retry_quietly(self: Any) -> str:
    ran()
    if self.request.retries == 0:
        self.retry(throw=False, countdown=0.5)
        return "first"
    return "second"


@app.task(bind=True, max_retries=0)
def retry_too_often(self: Any) -> None:
    ran()
    raise self.retry(exc=ValueError("no more"), countdown=0)


@app.task(bind=True)
def replaced(self: Any, by: str) -> Any:
    ran()
    new = {"task": add.si(2, 3), "chain": chain(add.si(1, 1), add.s(5)), "group": group(add.si(1, 1), add.si(1, 1))}
    return self.replace(new[by])


@app.task
def total(numbers: list[int]) -> int:
    ran()
    return sum(numbers)


@app.task(bind=True)
def growing(self: Any) -> int:
    ran()
    self.add_to_chord(add.si(10, 10).set(countdown=0.5))
    return 20


@app.task(bind=True)
def spawning(self: Any) -> list[str]:
    ran()
    return [add.delay(n, n).id for n in range(2)]


@app.task
def nesting(x: int) -> int:
    ran()
    return add(x, 1) + audited(x) + total.run([x])


@app.task(bind=True)
def whoami(self: Any, x: int, *, y: int = 2) -> dict[str, Any]:
    ran()
    said = {name: getattr(self.request, name) for name in ("id", "root_id", "parent_id", "args", "kwargs", "retries")}
    info = {**self.request.delivery_info}
    return {**said, "tenant": self.request.tenant, "stamps": self.request.stamps, "redelivered": info["redelivered"]}


@app.task(bind=True)
def progressing(self: Any) -> list[str]:
    ran()
    self.update_state(state="HALF", meta={"done": 50})
    return [self.AsyncResult(self.request.id).state, str(self.AsyncResult(self.request.id).info)]


@app.task
def ignoring() -> None:
    ran()
    raise Ignore("not today")


@app.task(acks_late=True)
def rejecting() -> None:
    ran()
    raise Reject("poison", requeue=False)


@app.task(acks_late=True, bind=True)
def giving_back(self: Any) -> str:
    ran()
    try:
        os.close(os.open(HERE / f"given-back-{self.request.id}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "taken again"
    raise Reject("again", requeue=True)


@app.task
def failing(why: str) -> None:
    ran()
    raise ValueError(why)


@app.task
def errback(request: Any, exc: Any, traceback: Any) -> None:
    saw("errback", request, exc=repr(exc))


@app.task
def old_errback(task_id: str) -> str:
    ran()
    return task_id


@app.task(name="mixed.news")
def news() -> str:
    ran()
    return "heard"


# --- tasks that come late -------------------------------------------------------------------------

app.autodiscover_tasks([f"{app.main}_parts"])
app.finalize()


@app.task(name="mixed.late")
def late() -> str:
    ran()
    return "late"


def make_later() -> Any:
    @app.task(name="mixed.lazily", lazy=False)
    def lazily() -> str:
        ran()
        return "lazily"

    return lazily


make_later()
