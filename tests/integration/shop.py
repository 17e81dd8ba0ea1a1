"""The task module real workers run: every body writes a line when it starts and when it ends, so a test can judge."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.workers import TaskApp

SOURCE = """
import os, signal, time
from pathlib import Path
from celery_idem import IdempotentTask, Policy
from celery_idem.app import runtime_of

HERE = Path(__file__).parent

def write(name, *words):
    with open(HERE / name, "a") as f:
        f.write(" ".join(map(str, words)) + "\\n")

def wait_for(name, seconds=30):
    deadline = time.monotonic() + seconds
    while not (HERE / name).exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} never came")
        time.sleep(0.01)

def once(name):
    try:
        os.close(os.open(HERE / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def told(event):
    write("events", event.name.value, event.fields.get("cause", "-"), event.fields["message_id"])
    if event.name.value == "PARKED" and (HERE / "stop-after-park").exists() and once("parked"):
        wait_for("go-on")

runtime_of(app).emit.listeners.append(told)

class Logged(IdempotentTask):
    abstract = True

    def log(self, word):
        run = self.idempotency
        write("runs", word, self.request.retries, run.attempt, run.fence, self.request.id, os.getpid(), time.time())

@app.task(base=Logged, bind=True)
def work(self, seconds, value="done"):
    self.log("start")
    time.sleep(seconds)
    self.log("end")
    return value

@app.task(base=Logged, bind=True)
def die_once(self, value="done"):
    self.log("start")
    if once("died"):
        os.kill(os.getpid(), signal.SIGKILL)
    self.log("end")
    return value

@app.task(base=Logged, bind=True, idempotency=Policy(on_unknown="fail"))
def die_and_tell(self):
    self.log("start")
    os.kill(os.getpid(), signal.SIGKILL)

@app.task(base=Logged, bind=True, idempotency=Policy(max_deliveries=2))
def die_always(self):
    self.log("start")
    os.kill(os.getpid(), signal.SIGKILL)

@app.task(base=Logged, bind=True)
def retry_once(self, countdown=0):
    self.log("start")
    if self.request.retries == 0:
        raise self.retry(countdown=countdown)
    self.log("end")
    return "second"

class KilledInRetry(Logged):
    abstract = True

    def apply_async(self, *args, **kwargs):
        sent = super().apply_async(*args, **kwargs)
        if kwargs.get("retries") == 1 and once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return sent

@app.task(base=KilledInRetry, bind=True)
def killed_in_retry(self):
    self.log("start")
    if self.request.retries == 0:
        raise self.retry(countdown=2)
    time.sleep(0.5)
    self.log("end")
    return "second"

@app.task(base=Logged, bind=True, soft_time_limit=3, idempotency=Policy(key="message", wait_timeout=20))
def limited_wait(self, value):
    self.log("start")
    time.sleep(0.1)
    self.log("end")
    return value

@app.task(base=Logged, bind=True, soft_time_limit=3)
def limited_body(self):
    self.log("start")
    time.sleep(30)

@app.task(base=Logged, bind=True, idempotency=Policy(key="order:{order}", fingerprint=["amount"]))
def charge(self, order, amount):
    self.log("start")
    time.sleep(0.3)
    self.log("end")
    return {"order": order, "amount": amount}

@app.task(base=Logged, bind=True)
def wait_for_go(self, name):
    self.log("start")
    wait_for(name)
    self.log("end")
    return "went"

@app.task(base=Logged, bind=True, acks_late=False)
def early(self, name):
    self.log("start")
    wait_for(name)

@app.task(base=Logged, bind=True)
def fail(self):
    self.log("start")
    raise ValueError("declined")
"""


@dataclass
class Run:
    """One line a body wrote."""

    word: str
    retries: int
    attempt: int
    fence: int
    id: str
    pid: int
    at: float


class Shop:
    """A ``TaskApp`` of ``SOURCE`` and what its bodies and events wrote."""

    def __init__(self, broker: str, store: str, **settings: Any) -> None:
        options = settings.pop("transport_options", None)
        conf: dict[str, Any] = {"idempotency_store": store, **settings}
        if options:
            conf["broker_transport_options"] = options
        self.tasks = TaskApp(SOURCE, broker=broker, settings=conf)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tasks.module, name)

    def runs(self, word: str | None = None) -> list[Run]:
        """Lines bodies wrote, in order; one word alone if given."""
        lines = [line.split() for line in _lines(self.tasks.path("runs"))]
        found = [Run(w, int(r), int(a), int(f), i, int(p), float(t)) for w, r, a, f, i, p, t in lines]
        return [run for run in found if word in {None, run.word}]

    def events(self) -> list[str]:
        """Names of the events the workers told, in order."""
        return [line.split()[0] for line in _lines(self.tasks.path("events"))]

    def starts(self) -> int:
        """How many bodies began."""
        return len(self.runs("start"))

    def touch(self, name: str) -> None:
        """Make the file a body or an event waits for."""
        self.tasks.path(name).touch()

    def exists(self, name: str) -> bool:
        """Whether a body or an event made the file."""
        return self.tasks.path(name).exists()

    def __enter__(self) -> Shop:
        return self

    def __exit__(self, *_: object) -> None:
        self.tasks.close()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def overlapping(runs: list[Run]) -> list[tuple[Run, Run]]:
    """Pairs of finished bodies that ran at the same time."""
    spans: list[tuple[Run, Run]] = []
    for start in (r for r in runs if r.word == "start"):
        end = next((r for r in runs if r.word == "end" and r.fence == start.fence), None)
        if end is not None:
            spans.append((start, end))
    return [
        (a[0], b[0]) for i, a in enumerate(spans) for b in spans[i + 1 :] if a[0].at < b[1].at and b[0].at < a[1].at
    ]
