"""SIGKILL pool children at random instants of a task that writes through ``transaction()``, and count its effects.

Each first delivery is killed once, by a process outside, so the kill strikes wherever the child happens to be: before
the claim, in the body, between two bytes of the commit, while Celery publishes, after the ack. Whatever was struck,
every message must have its effect once.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from celery_idem.core.records import State
from celery_idem.stores.base import open_store
from tests.campaigns.kills import places_for
from tests.campaigns.report import finish, progress, table
from tests.support.workers import TaskApp, WorkerProc, wait_until

STORES = ("postgresql", "sqlite")
WITHIN = 0.06
"""Seconds from the delivery to its kill, at most; undisturbed, a delivery takes about two thirds of it."""
MARKS = ("delivered", "began", "wrote", "returned", "told")
"""What a delivery leaves in the log before it comes to the next step."""

SOURCE = """
import os, random, subprocess, time
from pathlib import Path
from celery.signals import task_prerun, task_success
from sqlalchemy import text
from celery_idem import IdempotentTask
from celery_idem.app import runtime_of

HERE = Path(__file__).parent
WITHIN = float(os.environ.get("KILL_WITHIN", "0"))

def mark(word, message):
    with open(HERE / "lines", "a") as f:
        f.write(f"{word} {message} {os.getpid()}\\n")

@task_prerun.connect
def delivered(task_id=None, **_):
    mark("delivered", task_id)
    try:
        os.close(os.open(HERE / f"killed-{task_id}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    pid, seconds = os.getpid(), random.uniform(0, WITHIN)
    script = f"sleep {seconds}; kill -9 {pid} && echo killed {task_id} {pid} >> lines"
    subprocess.Popen(["sh", "-c", script], cwd=HERE, start_new_session=True)

@task_success.connect
def told(sender=None, **_):
    mark("told", sender.request.id)

@app.task(base=IdempotentTask, bind=True)
def write(self):
    message = self.request.id
    time.sleep(0.005)
    with self.idempotency.transaction() as connection:
        mark("began", message)
        connection.execute(text("INSERT INTO ledger VALUES (:message)"), {"message": message})
        mark("wrote", message)
        time.sleep(0.01)
    time.sleep(0.005)
    mark("returned", message)
    return message
"""


@dataclass
class Figures:
    """What one store's kills came to."""

    store: str
    kills: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    """Kills by the last mark of the message's first delivery."""
    runs: int = 0
    doubled: int = 0
    lost: int = 0
    wrong: int = 0
    """Messages without the right answer, or without a completion."""

    def row(self) -> list[Any]:
        """One line of the table."""
        return [self.store, self.kills, *(self.struck[mark] for mark in MARKS), self.runs, self.doubled, self.lost]

    def broken(self, messages: int) -> list[str]:
        """Promises it broke."""
        found = {"effects doubled": self.doubled, "effects lost": self.lost, "wrong answers": self.wrong}
        broken = [f"{self.store}: {number} {name}" for name, number in found.items() if number]
        if self.kills != messages:
            broken.append(f"{self.store}: {self.kills} kills, not {messages}")
        return broken


HEADER = ("store", "kills", *(f"after it {mark}" for mark in MARKS), "bodies", "effects doubled", "lost")


def series(store: str, places: tuple[str, str], messages: int, *, lanes: int = 2) -> Figures:
    """Send that many messages, have each kill its child once, and count.

    A lane is a queue and a worker with one child: a kill that comes late must not find another message's child.
    """
    broker, url = places
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE ledger (message TEXT)"))
    settings = {"idempotency_store": url}
    try:
        with TaskApp(SOURCE, broker=broker, settings=settings, env={"KILL_WITHIN": str(WITHIN)}) as tasks:
            queues = [f"{tasks.queue}_{number}" for number in range(lanes)]
            with contextlib.ExitStack() as workers:
                started = [workers.enter_context(tasks.worker(queues=[queue])) for queue in queues]
                answers = fed(tasks, started, queues, [f"m{number}" for number in range(messages)])
            with engine.connect() as connection:
                effects = Counter(row[0] for row in connection.execute(sa.text("SELECT message FROM ledger")))
            return judged(store, url, lines(tasks), effects, answers)
    finally:
        engine.dispose()


def fed(
    tasks: TaskApp, workers: Sequence[WorkerProc], queues: Sequence[str], messages: Sequence[str]
) -> dict[str, Any]:
    """Send the messages, one at a time in each lane, and return what each answered."""
    unsent, open_ones, answers = list(messages), dict[str, tuple[str, Any]](), dict[str, Any]()

    def step() -> bool:
        for worker in workers:
            assert worker.alive, worker.log_tail()
        struck = {message for word, message, _ in lines(tasks) if word == "killed"}
        for queue, (message, result) in list(open_ones.items()):
            if message in struck and result.state in {"SUCCESS", "FAILURE"}:
                answers[message] = result.result
                del open_ones[queue]
        for queue in queues:
            if unsent and queue not in open_ones:
                message = unsent.pop(0)
                open_ones[queue] = message, tasks.module.write.apply_async(task_id=message, queue=queue)
        return not open_ones

    try:
        wait_until(step, 60 + 5 * len(messages), "every message's answer", interval=0.02)
    except AssertionError as error:
        progress(str(error))  # the figures say what is missing
    return {message: answers.get(message) for message in messages}


def lines(tasks: TaskApp) -> list[tuple[str, str, int]]:
    """What deliveries and kills left: word, message, process."""
    path = tasks.path("lines")
    split = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(word, message, int(pid)) for word, message, pid in split]


def judged(
    store: str, url: str, lines: list[tuple[str, str, int]], effects: Counter[str], answers: dict[str, Any]
) -> Figures:
    """Count it all."""
    records = open_store(url)
    completed = sum(record.state is State.COMPLETED for record in records.find(limit=len(answers) + 1))
    records.close()
    struck = Counter[str]()
    for _, message, pid in [line for line in lines if line[0] == "killed"]:
        marks = [word for word, m, p in lines if (m, p) == (message, pid) and word in MARKS]
        struck[marks[-1]] += 1
    return Figures(
        store,
        kills=sum(word == "killed" for word, _, _ in lines),
        struck=struck,
        runs=sum(word == "began" for word, _, _ in lines),
        doubled=sum(times - 1 for times in effects.values()),
        lost=sum(message not in effects for message in answers),
        wrong=sum(answer != message for message, answer in answers.items()) + abs(len(answers) - completed),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run every series and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.transactions", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="kills per store, one per message (50)")
    parser.add_argument("--stores", default=",".join(STORES), help=f"some of {','.join(STORES)}")
    given = parser.parse_args(argv)
    found: list[Figures] = []
    for store in given.stores.split(","):
        with places_for(store) as places:
            progress(f"{store}: {given.kills} kills")
            found.append(series(store, places, given.kills))
    broken = [line for figures in found for line in figures.broken(given.kills)]
    title = "Children killed by SIGKILL at random instants of a transactional task"
    return finish(title, table(HEADER, [figures.row() for figures in found]), broken)


if __name__ == "__main__":
    sys.exit(main())
