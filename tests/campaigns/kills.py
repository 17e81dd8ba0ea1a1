"""SIGKILL a pool child at the two worst moments, many times, and count bodies, effects, replays and losses.

``between`` kills after the body's effect and before the completion; ``verified`` is the same for a task that can look
whether its effect happened; ``after`` kills after the completion and before the ack. Every message is killed once.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery_idem.stores.base import open_store
from tests.campaigns.report import finish, percentile, progress, table
from tests.support.processes import remove_dir, scratch_dir
from tests.support.services import PostgresServer, RabbitServer, RedisServer
from tests.support.workers import TaskApp, WorkerProc, wait_until

LEASE = 60.0
"""Seconds, the default; a dead child must cost far less."""
AT_MOST = LEASE / 2
"""Seconds from a kill to the second delivery, promised on a busy machine; Celery itself needs one or two."""
MOMENTS = ("between", "verified", "after")
STORES = ("redis", "postgresql", "sqlite")

SOURCE = """
import os, signal, time
from pathlib import Path
from celery_idem import Happened, IdempotentTask, NotHappened, Policy
from celery_idem.app import runtime_of
from celery_idem.core.engine import Engine

HERE = Path(__file__).parent

def write(*words):
    with open(HERE / "lines", "a") as f:
        f.write(" ".join(map(str, words)) + "\\n")

def die_once(message):
    try:
        os.close(os.open(HERE / f"killed-{message}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    write("kill", message, time.time())
    os.kill(os.getpid(), signal.SIGKILL)

def told(event):
    write(event.name.value, event.fields["message_id"], time.time())

runtime_of(app).emit.listeners.append(told)

if os.environ.get("DIES_AFTER_COMPLETION"):
    complete = Engine.complete

    def complete_and_die(self, claim, outcome, **more):
        ended = complete(self, claim, outcome, **more)
        if claim.operation.task.endswith(".after"):
            die_once(claim.operation.delivery.message_id)
        return ended

    Engine.complete = complete_and_die

class Logged(IdempotentTask):
    abstract = True

    def effect(self):
        write("effect", self.request.id, time.time())
        return self.request.id

@app.task(base=Logged, bind=True)
def between(self):
    value = self.effect()
    die_once(value)
    return value

def look(message):
    if f"effect {message} " in (HERE / "lines").read_text():
        return Happened(message)
    return NotHappened()

@app.task(base=Logged, bind=True, idempotency=Policy(verify=look))
def verified(self, message):
    value = self.effect()
    die_once(value)
    return value

@app.task(base=Logged, bind=True)
def after(self):
    return self.effect()
"""


@dataclass
class Figures:
    """What one series of kills came to."""

    store: str
    moment: str
    kills: int = 0
    bodies: int = 0
    twice: int = 0
    lost: int = 0
    replays: int = 0
    reclaims: int = 0
    seconds: list[float] = field(default_factory=list)

    def row(self) -> list[Any]:
        """One line of the table."""
        p50, longest = percentile(self.seconds, 0.5), max(self.seconds, default=float("nan"))
        counts = [self.kills, self.bodies, self.twice, self.lost, self.replays]
        return [f"{self.store}, {self.moment}", *counts, p50, longest]

    def broken(self, messages: int) -> list[str]:
        """Promises this series broke."""
        again = messages if self.moment == "between" else 0
        wanted = {
            "kills": (self.kills, messages),
            "bodies": (self.bodies, messages + again),
            "effects twice": (self.twice, again),
            "lost": (self.lost, 0),
            "replays": (self.replays, 0 if self.moment == "between" else messages),
        }
        where = f"{self.store}, {self.moment}"
        found = [f"{where}: {name} {got}, not {due}" for name, (got, due) in wanted.items() if got != due]
        if max(self.seconds, default=float("inf")) >= AT_MOST:
            found.append(f"{where}: {max(self.seconds, default=0):.1f} s from a kill to the second delivery")
        return found


HEADER = ("store, killed", "kills", "bodies", "effects twice", "lost", "replays", "to 2nd delivery p50 s", "max s")


def series(
    store: str, places: tuple[str, str], messages: int, *, moments: Sequence[str] = MOMENTS, concurrency: int = 2
) -> list[Figures]:
    """Send that many messages per moment to one worker, let each kill its child once, and count by moment."""
    broker, url = places
    settings = {"idempotency_store": url, "idempotency_lease": LEASE}
    with TaskApp(SOURCE, broker=broker, settings=settings, env={"DIES_AFTER_COMPLETION": "1"}) as tasks:
        with tasks.worker(concurrency=concurrency) as worker:
            sent = [f"{moment}{number}" for number in range(messages) for moment in moments]
            answers = fed(tasks, worker, sent, concurrency)
        return [judged(store, moment, lines(tasks), answers) for moment in moments]


def fed(tasks: TaskApp, worker: WorkerProc, messages: Sequence[str], at_once: int) -> dict[str, Any]:
    """Send the messages, as many at once as the pool has children, and return what each answered.

    So the time to a second delivery has no queue in it: Redis gives a message back behind all others.
    """
    unsent, open_ones, answers = list(messages), dict[str, Any](), dict[str, Any]()

    def step() -> bool:
        assert worker.alive, worker.log_tail()
        told = {message for word, message, _ in lines(tasks) if word in {"REPLAYED", "LEASE_RECLAIMED"}}
        for message in [m for m, result in open_ones.items() if m in told and result.state == "SUCCESS"]:
            answers[message] = open_ones.pop(message).result
        while unsent and len(open_ones) < at_once:
            message = unsent.pop(0)
            task = getattr(tasks.module, message.rstrip("0123456789"))
            open_ones[message] = task.apply_async(
                (message,) if task.name.endswith(".verified") else (), task_id=message
            )
        return not open_ones

    try:
        wait_until(step, 60 + 5 * len(messages), "every message's second delivery", interval=0.05)
    except AssertionError as error:
        progress(str(error))  # the figures say what is missing
    return {message: answers.get(message) for message in messages}


def lines(tasks: TaskApp) -> list[tuple[str, str, float]]:
    """What bodies, kills and events wrote: word, message, moment."""
    path = tasks.path("lines")
    split = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(word, message, float(at)) for word, message, at in split]


def judged(store: str, moment: str, lines: list[tuple[str, str, float]], answers: dict[str, Any]) -> Figures:
    """Count the lines and answers of one moment's messages."""
    written = [line for line in lines if line[1].startswith(moment)]
    words = Counter(word for word, _, _ in written)
    effects = Counter(message for word, message, _ in written if word == "effect")
    killed = {message: at for word, message, at in written if word == "kill"}
    again = "effect" if moment == "between" else "REPLAYED"
    seconds = []
    for message, at in killed.items():
        later = [t for word, m, t in written if m == message and word == again and t > at]
        seconds += [min(later) - at] if later else []
    sent = {message: answer for message, answer in answers.items() if message.startswith(moment)}
    return Figures(
        store,
        moment,
        kills=words["kill"],
        bodies=words["effect"],
        twice=sum(times - 1 for times in effects.values()),
        lost=sum(1 for message, answer in sent.items() if answer != message or message not in effects),
        replays=words["REPLAYED"],
        reclaims=words["LEASE_RECLAIMED"],
        seconds=seconds,
    )


@contextlib.contextmanager
def places_for(store: str) -> Iterator[tuple[str, str]]:
    """A broker and a store on private servers: Redis for both, RabbitMQ and PostgreSQL, or Redis and a SQLite file.

    Not kombu's filesystem transport: it may read a message that is still being written, and the worker then ends.
    """
    with contextlib.ExitStack() as servers:
        if store == "redis":
            yield servers.enter_context(RedisServer()).url, servers.enter_context(RedisServer()).url
        elif store == "postgresql":
            broker, database = servers.enter_context(RabbitServer()), servers.enter_context(PostgresServer())
            yield broker.url, prepared(database.url)
        else:
            yield servers.enter_context(RedisServer()).url, servers.enter_context(sqlite_file())


@contextlib.contextmanager
def sqlite_file() -> Iterator[str]:
    """The URL of a SQLite store in a directory of its own."""
    directory: Path = scratch_dir("store")
    try:
        yield prepared(f"sqlite:///{directory / 'store.db'}")
    finally:
        remove_dir(directory)


def prepared(url: str) -> str:
    """The URL, once the store behind it has its schema."""
    store = open_store(url, timeout=30)
    store.create_schema()
    store.close()
    return url


def main(argv: Sequence[str] | None = None) -> int:
    """Run every series and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="kills per store and moment, one per message (50)")
    parser.add_argument("--stores", default=",".join(STORES), help=f"some of {','.join(STORES)}")
    parser.add_argument("--moments", default=",".join(MOMENTS), help=f"some of {','.join(MOMENTS)}")
    given = parser.parse_args(argv)
    found: list[Figures] = []
    for store in given.stores.split(","):
        with places_for(store) as places:
            progress(f"{store}: {given.kills} kills {given.moments}")
            found += series(store, places, given.kills, moments=given.moments.split(","))
    broken = [line for figures in found for line in figures.broken(given.kills)]
    return finish("Children killed by SIGKILL", table(HEADER, [figures.row() for figures in found]), broken)


if __name__ == "__main__":
    sys.exit(main())
