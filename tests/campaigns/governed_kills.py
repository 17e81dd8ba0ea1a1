"""SIGKILL at every place the code of a governed action comes to, one action each, and count what reached the house.

The table of places is not written down anywhere: an action that nobody kills is run by a real worker, which lists each
line, statement, HTTP stage and delivery moment of its four steps (``governed_points``). Then each place kills an action
of its own. ``child`` kills the pool process, ``worker`` the whole worker, with a new one started, and ``doubt`` the
pool process of actions whose answer is lost, at the places only those come to. The house (``governed_house``) pays as
often as it is asked.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import sqlalchemy as sa

from celery_idem.governed import SQLActionStore
from celery_idem.governed.chain import approve, governance_of, propose
from celery_idem.governed.sql import schema
from tests.campaigns.governed_house import Account, house, ledger
from tests.campaigns.governed_points import CHILD, WATCH, WORKER, Place
from tests.campaigns.report import finish, percentile, progress, table
from tests.support.processes import remove_dir, scratch_dir
from tests.support.services import PostgresServer, RedisServer
from tests.support.workers import TaskApp, WorkerProc, wait_until

STORES = ("postgresql", "sqlite")
SERIES = ("child", "doubt", "worker")
SHARES = {
    ("postgresql", "child"): 1,
    ("postgresql", "doubt"): 4,
    ("postgresql", "worker"): 40,
    ("sqlite", "child"): 8,
    ("sqlite", "doubt"): 8,
    ("sqlite", "worker"): 80,
}
"""Of the lines, every which one kills. Statements, HTTP stages and moments all do, but for ``worker``."""
AT_ONCE = 4
"""Children, and actions on their way to their deaths."""
RECOVERING = 40
"""Actions that live on after it."""
ENDS_WITHIN = 120.0
"""Seconds after which no action may be open any more; it takes a few."""

NEW = ("--max-tasks-per-child", "1")
"""For a worker whose processes do one thing each."""

SETTINGS = {
    "governed_lease": 2,
    "governed_sweep_interval": 0.5,
    "governed_sweep_grace": 2,
}

SOURCE = """
import os
from pathlib import Path

from pydantic import BaseModel

import celery_idem.governed.chain
from celery_idem.governed import HTTPEndpoint, action

KIND = f"house.refund.{__name__}"

class Refund(BaseModel):
    order: str
    way: str

@action(KIND, payload=Refund, observe_delay=0, observation_window=300, max_observations=6)
class Desk(HTTPEndpoint):
    url = os.environ.get("HOUSE", "http://127.0.0.1") + "/refunds"
    allow_http = True
    timeout = 5

if "HOUSE" in os.environ:
    from tests.campaigns.governed_points import arm

    arm(Path(__file__).parent)
"""


@dataclass(frozen=True)
class Fate:
    """What became of one action that was to be killed once."""

    place: Place
    action: Any
    account: Account
    letters: int
    struck: bool
    seconds: float
    """From the kill to the end."""

    @property
    def state(self) -> str:
        """``completed``, ``ambiguous``, ``failed`` for any other failure, ``open``."""
        state = str(self.action["state"])
        if state == "failed":
            return "ambiguous" if (self.action["result"] or {}).get("status") == "ambiguous" else "failed"
        return "completed" if state == "completed" else "open"

    def broken(self) -> list[str]:
        """Promises that did not hold."""
        puts, refunds, attempts = self.account.puts, self.account.refunds, self.action["attempt_count"]
        problems = {
            f"open after {ENDS_WITHIN:g} s: {self.action['state']}": self.state == "open",
            f"failed: {self.action['last_error']}": self.state == "failed",
            f"{puts} PUTs, {refunds} refunds, {attempts} attempts": max(puts, refunds, attempts) > 1,
            f"{self.state}, with {refunds} refunds": (self.state == "completed") != (refunds > 0),
            f"{self.state}, with {self.letters} dead letters": self.letters != (self.state == "ambiguous"),
        }
        where = " ".join(str(self.place).split())
        return [f"{where}: {problem}" for problem, is_there in problems.items() if is_there]


class Site:
    """An app with its store, its broker and a house."""

    def __init__(self, store: str, redis: RedisServer, house: str) -> None:
        with SQLActionStore(store) as made:
            made.create_schema()
        settings = {**SETTINGS, "governed_store": store, "idempotency_store": redis.new_database()}
        self.tasks = TaskApp(
            SOURCE, broker=redis.new_database(), backend=redis.new_database(), settings=settings, env={"HOUSE": house}
        )
        self.house = house
        self._workers: list[WorkerProc] = []
        self._engine = sa.create_engine(store)
        self._orders = 0

    @property
    def store(self) -> SQLActionStore:
        """The store as this process sees it."""
        return governance_of(self.tasks.app).store

    def worker(self, **options: Any) -> WorkerProc:
        """A worker that does as it is planned, started."""
        self._workers.append(self.tasks.worker(**options).start())
        return self._workers[-1]

    def stuck(self) -> int:
        """How often a process waited for a connection to the database in vain, as one does that inherited a lock."""
        return sum(worker.log.count("no connection in time") for worker in self._workers)

    def send(self, who: str, place: Place | None, way: str) -> str:
        """Approve an action with this in store for it; its id."""
        self._orders += 1
        payload = {"order": f"o-{self._orders}", "way": way}
        action = propose(self.tasks.module.KIND, payload, idempotency_key=payload["order"], app=self.tasks.app)
        action_id = str(action["action_id"])
        self.tasks.path(f"{action_id}.plan").write_text(who if place is None else f"{who}\n{place}")
        approve(action_id, principal="owner", app=self.tasks.app)
        return action_id

    def struck(self, action_id: str) -> bool:
        """Whether it was killed."""
        return self.tasks.path(f"{action_id}.struck").exists()

    def open(self) -> set[str]:
        """The ids of all actions that have not ended."""
        c = schema.action.c
        with self._engine.connect() as connection:
            return set(connection.execute(sa.select(c.action_id).where(c.terminal_at.is_(None))).scalars())

    def watched(self, way: str) -> list[Place]:
        """The places an action comes to in processes that have done nothing else."""
        with self.worker(concurrency=1, extra=NEW):
            action_id = self.send(WATCH, None, way)
            wait_until(lambda: action_id not in self.open(), 60, "the action nobody kills ends", interval=0.1)
            wait_until(lambda: self._told(action_id), 20, "its last message is told", interval=0.1)
        assert self.store.get_action(action_id)["state"] == "completed"
        places: dict[tuple[Any, ...], Place] = {}
        for text in self.tasks.path(f"{action_id}.places").read_text().splitlines():
            place = Place.read(text)
            # A later try of the step comes to the same lines.
            places.setdefault((place.step, place.what) if place.kind == "line" else place, place)
        return list(places.values())

    def _told(self, action_id: str) -> bool:
        return "complete\t0\tmessage\tmessage\tbefore ack" in self.tasks.path(f"{action_id}.places").read_text()

    def close(self) -> None:
        """End everything."""
        self.store.close()
        self._engine.dispose()
        self.tasks.close()


# --- which places ----------------------------------------------------------------------------------------------------


def sample(places: Sequence[Place], every: int, *, boundaries: int = 1) -> list[Place]:
    """Every so manyth line, and every so manyth of the rest; of the mutation's own HTTP stages none is left out."""
    lines = [place for place in places if place.kind == "line"]
    mutation = [place for place in places if (place.kind, place.call) == ("http", "PUT")]
    rest = [place for place in places if place.kind != "line" and place not in mutation]
    chosen = {*lines[::every], *rest[::boundaries], *mutation}
    return [place for place in places if place in chosen]


# --- killing ---------------------------------------------------------------------------------------------------------


def killed(site: Site, places: Sequence[Place], *, who: str = CHILD, way: str = "pay") -> list[Fate]:
    """Kill an action at each place, and see what becomes of all of them.

    Some places a process comes to only once in its life, some only where it was there before its worker first swept,
    and which try of a step does the work is a matter of time. What an action missed, others try again in new processes,
    then in new workers.
    """
    sent = _round(site, places, who, way)
    missed = _missed(site, places, sent)
    sent += _round(site, missed, who, way, extra=NEW)
    for _ in range(2):
        missed = _missed(site, places, sent)
        for first in range(0, len(missed), AT_ONCE):
            sent += _round(site, missed[first : first + AT_ONCE], who, way)
    accounts = ledger(site.house)
    letters = Counter(letter["action_id"] for letter in site.store.list_dead_letters(limit=10_000))
    return [
        _fate(site, place, action_id, accounts.get(action_id, Account()), letters[action_id])
        for place, action_id in sent
    ]


def _missed(site: Site, places: Sequence[Place], sent: Sequence[tuple[Place, str]]) -> list[Place]:
    struck = {place for place, action_id in sent if site.struck(action_id)}
    missed = [place for place in places if place not in struck]
    if missed:
        progress(f"{len(missed)} places were not come to")
    return missed


def _round(
    site: Site, places: Sequence[Place], who: str, way: str, *, extra: Sequence[str] = ()
) -> list[tuple[Place, str]]:
    at_once = 1 if who == WORKER else AT_ONCE
    unsent, sent = list(places), list[tuple[Place, str]]()
    open_ones, dying = set[str](), set[str]()
    worker: WorkerProc | None = None
    try:
        ends = time.monotonic() + ENDS_WITHIN
        while (unsent or open_ones) and time.monotonic() < ends:
            if worker is None or not worker.alive:
                if worker is not None:
                    worker.kill()
                worker = site.worker(concurrency=AT_ONCE, extra=extra)
            open_ones = site.open()
            dying = {action_id for action_id in dying & open_ones if not site.struck(action_id)}
            while unsent and len(dying) < at_once and len(open_ones) < RECOVERING:
                place = unsent.pop(0)
                action_id = site.send(who, place, way)
                sent.append((place, action_id))
                dying.add(action_id)
                open_ones.add(action_id)
                ends = time.monotonic() + ENDS_WITHIN
                if not len(sent) % 100:
                    progress(f"{len(sent)} of {len(places)}")
            time.sleep(0.1)
        return sent
    finally:
        if worker is not None:
            worker.kill()


def _fate(site: Site, place: Place, action_id: str, account: Account, letters: int) -> Fate:
    action = site.store.get_action(action_id)
    struck = site.tasks.path(f"{action_id}.struck")
    at = struck.stat().st_mtime if struck.exists() else float("nan")
    ended = action["terminal_at"] or float("nan")
    return Fate(place, action, account, letters, struck.exists(), max(ended - at, 0.0))


# --- the campaign ----------------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """One series on one store."""

    name: str
    places: list[Place]
    fates: list[Fate]
    stuck: int

    def broken(self) -> list[str]:
        """Promises this series broke."""
        found = [f"{self.name}: {line}" for fate in self.fates for line in fate.broken()]
        missed = set(self.places) - {fate.place for fate in self.fates if fate.struck}
        found += [f"{self.name}: nothing was killed at {' '.join(str(place).split())}" for place in missed]
        if self.stuck:
            found.append(f"{self.name}: {self.stuck} times a process got no connection, though the database answered")
        return found


HEADER = (
    "killed at",
    *("lines", "SQL", "HTTP", "moments"),
    *("PUTs 0", "1", "2+"),
    *("completed", "ambiguous", "failed", "open"),
    *("kill to end p50 s", "max s"),
)


def row(name: str, fates: Sequence[Fate]) -> list[Any]:
    """One line of the table."""
    kinds = Counter(fate.place.kind for fate in fates)
    puts = Counter(min(fate.account.puts, 2) for fate in fates)
    ends = Counter(fate.state for fate in fates)
    seconds = [fate.seconds for fate in fates if not math.isnan(fate.seconds)]
    return [
        name,
        *(kinds[kind] for kind in ("line", "sql", "http", "message")),
        *(puts[count] for count in range(3)),
        *(ends[end] for end in ("completed", "ambiguous", "failed", "open")),
        percentile(seconds, 0.5),
        max(seconds, default=float("nan")),
    ]


def rows(named: Iterable[tuple[str, Fate]]) -> list[list[Any]]:
    """One line for each name, in the order they first come, and one for all."""
    groups: dict[str, list[Fate]] = {}
    for name, fate in named:
        groups.setdefault(name, []).append(fate)
    return [*(row(name, fates) for name, fates in groups.items()), row("all", [*chain(*groups.values())])]


def printed(found: Sequence[Figures]) -> str:
    """By series and step, by what the step was doing, and by module."""
    every = [(figures.name, fate) for figures in found for fate in figures.fates if fate.struck]
    modules = [(fate.place.what.partition(":")[0], fate) for _, fate in every if fate.place.kind == "line"]
    named = (
        [(f"{name}, {fate.place.step}", fate) for name, fate in every],
        [(f"{fate.place.step}: {fate.place.call}", fate) for _, fate in every],
        sorted(modules, key=lambda module: module[0]),
    )
    return "\n\n".join(table(HEADER, rows(one)) for one in named)


def figures_of(site: Site, name: str, series: str, every: int) -> Figures:
    """One series on one site."""
    plain = site.watched("pay")
    if series == "worker":
        places, who, way = sample(plain, every, boundaries=6), WORKER, "pay"
    elif series == "doubt":
        known = {(place.step, place.kind, place.what) for place in plain}
        others = [p for p in site.watched("late") if p.kind != "line" or (p.step, p.kind, p.what) not in known]
        places, who, way = sample([p for p in others if p not in plain], every), CHILD, "late"
    else:
        places, who, way = sample(plain, every), CHILD, "pay"
    progress(f"{name}: {len(places)} places, of {len(plain)} an undisturbed action comes to")
    return Figures(name, places, killed(site, places, who=who, way=way), site.stuck())


@contextlib.contextmanager
def site_on(store: str) -> Iterator[Site]:
    """A site on private servers."""
    with contextlib.ExitStack() as stack:
        redis, other = stack.enter_context(RedisServer()), stack.enter_context(house())
        if store == "postgresql":
            url = stack.enter_context(PostgresServer()).create_database()
        else:
            place = scratch_dir("ledger")
            stack.callback(remove_dir, place)
            url = f"sqlite:///{place / 'actions.db'}"
        yield stack.enter_context(contextlib.closing(Site(url, redis, other)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run every series and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.governed_kills", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="kill at every so manyth of the lines that are due (1)")
    parser.add_argument("--store", default=",".join(STORES), help=f"some of {','.join(STORES)}")
    parser.add_argument("--series", default=",".join(SERIES), help=f"some of {','.join(SERIES)}")
    given = parser.parse_args(argv)
    found: list[Figures] = []
    for store in given.store.split(","):
        for series in given.series.split(","):
            with site_on(store) as site:
                found.append(figures_of(site, f"{store}, {series}", series, SHARES[store, series] * given.every))
    broken = [line for figures in found for line in figures.broken()]
    return finish("Governed actions killed by SIGKILL", printed(found), broken)


if __name__ == "__main__":
    sys.exit(main())
