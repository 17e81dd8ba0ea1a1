"""The cells of the matrix: pool x broker x shape of the work x what happens to its message."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

POOLS = ("prefork", "threads", "solo", "gevent")
BROKERS = ("redis", "rabbitmq")
SHAPES = ("plain", "retry", "chain", "chord", "link", "replace", "group")
LIVE = ("first run", "duplicate after", "duplicate during")
KILLS = ("kill before completion", "kill before publish")
"""The second one comes after the completion and before Celery publishes what follows."""


@dataclass(frozen=True)
class Cell:
    """One square of the matrix."""

    pool: str
    broker: str
    shape: str
    moment: str

    def __str__(self) -> str:
        return f"{self.pool}-{self.broker}-{self.shape}-{self.moment}".replace(" ", "-")

    @property
    def tag(self) -> str:
        """What its tasks write their lines under."""
        return str(self)


LIVE_CELLS = [Cell(*row) for row in itertools.product(POOLS, BROKERS, SHAPES, LIVE)]
KILL_CELLS = [Cell(*row) for row in itertools.product(POOLS, BROKERS, SHAPES, KILLS)]


def pairwise() -> list[Cell]:
    """Kill cells in which every pair of pool, broker, shape and moment occurs."""
    return [
        Cell(pool, BROKERS[(row + column) % 2], shape, KILLS[(row // 2 + column) % 2])
        for row, pool in enumerate(POOLS)
        for column, shape in enumerate(SHAPES)
    ]


INTRODUCTION = """\
# The matrix

What real workers did, per pool, broker and shape of work, when the first message of that work met this. Written by
`make matrix`; every cell is a test of `tests/matrix`. The numbers of bodies are exact: each ran once, and the first one
once more where its process was killed in it before the completion (of a retry with countdown 0, before RETRY was
stored). The results are what bare Celery would have said.

Redis was broker, result backend and store; with RabbitMQ the store was PostgreSQL and the result backend a database. In
prefork the child was killed, elsewhere the whole worker, and another one was started.

- *plain*: a task. *retry*: it retries once. *link*: a plain callback. *replace*: the task replaces itself with another.
- *chain*: two idempotent steps and a plain one. *group*: two members. *chord*: two members and a body, a plain one on
  Redis.
"""


def page(passed: Collection[str]) -> str:
    """The page that says which cells passed."""
    parts = [INTRODUCTION]
    for moment in (*LIVE, *KILLS):
        parts.append(f"## {moment.capitalize()}\n")
        parts.append("| pool, broker | " + " | ".join(SHAPES) + " |\n|---|" + "---|" * len(SHAPES))
        for pool, broker in itertools.product(POOLS, BROKERS):
            marks = ["✓" if str(Cell(pool, broker, shape, moment)) in passed else "✗" for shape in SHAPES]
            parts.append(f"| {pool}, {broker} | " + " | ".join(marks) + " |")
        parts.append("")
    return "\n".join(parts)
