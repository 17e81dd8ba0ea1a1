"""A ledger of a million actions, a thousand of them ready: what leasing, sweeping and finding cost, by which index.

The same calls go to a ledger with the thousand alone, in turn, so that a change of the machine's speed meets both: what
the 999,000 that have ended cost is the quotient. Then the plan of each query, as the store sends it, is asked for.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from celery_idem.governed import SQLActionStore
from celery_idem.governed.canonical import digest_of
from tests.campaigns.report import finish, percentile, progress, table
from tests.support.services import PostgresServer

ENDED, READY = 999_000, 1_000
FAILED = 1_000
"""Of so many actions that have ended, one has failed."""
AT_MOST = 1.5
"""Median on the large ledger over the median on the small one."""
CALLS = 200
"""Of each verb but ``lease_next``, which is called once for each action that is ready."""

FILL = """
    INSERT INTO celery_idem_action (action_id, idempotency_key, source, action_type, payload, payload_sha256, state,
      attempt_count, max_attempts, next_attempt_at, lease_owner, lease_expires_at, created_at, updated_at)
    WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})
    SELECT '{state}-' || i, '{state}-' || i, 'shop', 'payments.refund', '{{}}', '{digest}', '{state}', {attempts}, 1,
      {due}, {owner}, {until}, {due}, {due} FROM n
"""


def filling(count: int, state: str, *, attempts: int, due: str, owner: str = "NULL", until: str = "NULL") -> str:
    """The statement that inserts so many actions; what is text here is SQL, ``i`` the number of the action."""
    return FILL.format(**locals(), digest=digest_of("{}"))


def fill(engine: Engine, ended: int, ready: int) -> None:
    """A ledger of so many actions that ended over the last years, and so many that became ready within the hour."""
    now = time.time()
    with engine.begin() as connection:
        found = connection.execute(
            sa.text("SELECT indexdef FROM pg_indexes WHERE tablename = 'celery_idem_action' AND indexdef ~ ' INDEX '")
        )
        definitions = [each for (each,) in found if " UNIQUE " not in each]
        for each in definitions:
            connection.exec_driver_sql(f"DROP INDEX {each.split()[2]}")
        if ended:
            failed = ended // FAILED
            connection.exec_driver_sql(filling(ended - failed, "completed", attempts=1, due=f"{now - 1e8} + i * 90"))
            connection.exec_driver_sql(filling(failed, "failed", attempts=1, due=f"{now - 1e8} + i * {90 * FAILED}"))
        connection.exec_driver_sql(filling(ready, "gated", attempts=0, due=f"{now - 3600} + i"))
        for each in definitions:
            connection.exec_driver_sql(each)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM ANALYZE celery_idem_action")


# --- plans -----------------------------------------------------------------------------------------------------------


def plans(engine: Engine, call: Callable[[], Any]) -> list[str]:
    """How the database runs each query on actions that the call sends through this engine, as text."""
    sent: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> None:
        if "FROM celery_idem_action " in statement.replace("\n", " ") and "INSERT" not in statement:
            sent.append((statement, parameters))

    sa.event.listen(engine, "before_cursor_execute", note)
    try:
        call()
    finally:
        sa.event.remove(engine, "before_cursor_execute", note)
    explain = "EXPLAIN QUERY PLAN" if engine.dialect.name == "sqlite" else "EXPLAIN"
    with engine.connect() as connection:
        return [
            "\n".join(str(row[-1]) for row in connection.exec_driver_sql(f"{explain} {statement}", parameters))
            for statement, parameters in sent
        ]


SIGNS = (
    "Index Scan using ",
    "Index Only Scan using ",
    "Bitmap Index Scan on ",
    "USING INDEX ",
    "USING COVERING INDEX ",
)


def index_of(plan: str) -> str:
    """The index a plan reads actions by, or how else it reads them."""
    for line in plan.splitlines():
        for sign in SIGNS:
            if sign in line:
                return line.split(sign)[1].split()[0]
    scans = [line.strip(" ->") for line in plan.splitlines() if "Scan" in line or "SCAN" in line]
    return scans[-1] if scans else plan


Call = Callable[["Side"], Any]


# --- taking turns ----------------------------------------------------------------------------------------------------


@dataclass
class Side:
    """One of the two ledgers, and the seconds each verb took on it."""

    name: str
    engine: Engine
    store: SQLActionStore
    middle: str
    """The id of an action that half of the others are older than."""
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def timed(self, verb: str, call: Call) -> Any:
        """What the call answers, its time noted."""
        began = time.perf_counter()
        answer = call(self)
        self.seconds.setdefault(verb, []).append(time.perf_counter() - began)
        return answer


STATES = ("gated", "accepted", "verified")
READY_INDEX = "celery_idem_action_ready"
VERBS: dict[str, tuple[Call, str]] = {
    "lease_next, nothing ready": (
        lambda side: side.store.lease_next("w", lease_seconds=3600, states=STATES),
        READY_INDEX,
    ),
    "lease_dispatched_observation": (
        lambda side: side.store.lease_dispatched_observation("w", lease_seconds=60),
        "celery_idem_action_observable",
    ),
    "recover_expired_leases": (lambda side: side.store.recover_expired_leases(), "celery_idem_action_leased"),
    "stranded": (lambda side: side.store.stranded(120), "celery_idem_action_quiet"),
    "find(), first page": (lambda side: side.store.find(limit=20), "celery_idem_action_by_age"),
    "find(), a page in the middle": (
        lambda side: side.store.find(limit=20, after=side.middle),
        "celery_idem_action_by_age",
    ),
    "find(source=)": (lambda side: side.store.find(source="shop", limit=20), "celery_idem_action_by_age"),
    "find('failed')": (lambda side: side.store.find("failed", limit=20), "celery_idem_action_by_state"),
    "find('failed'), a page in the middle": (
        lambda side: side.store.find("failed", limit=20, after=side.middle),
        "celery_idem_action_by_state",
    ),
}
"""What is called besides ``lease_next``, and the index it should read by."""
UNLIKE = {"find('failed')", "find('failed'), a page in the middle"}
"""The small ledger has none of these, so nothing is promised of the quotient."""


@contextmanager
def sides(ended: int, ready: int) -> Iterator[list[Side]]:
    """The large ledger and the small one, on one private server."""
    with PostgresServer() as server:
        made = []
        for name, count in (("large", ended), ("small", 0)):
            engine = sa.create_engine(server.create_database())
            store = SQLActionStore(engine)
            store.create_schema()
            began = time.monotonic()
            fill(engine, count, ready)
            progress(f"{name}: {count + ready} actions in {time.monotonic() - began:.1f} s")
            middle = f"completed-{count // 2}" if count else f"gated-{ready // 2}"
            made.append(Side(name, engine, store, middle))
        yield made
        for side in made:
            side.engine.dispose()


def lease_one(side: Side, seconds: float = 3600) -> Any:
    """Lease the next action that is ready."""
    return side.store.lease_next("w", lease_seconds=seconds, states=["gated"])


def lease_all(both: list[Side], ready: int) -> list[str]:
    """Lease every action that is ready, on both in turn; promises broken."""
    broken = []
    taken: dict[str, list[str]] = {side.name: [] for side in both}
    for _ in range(ready):
        for side in both:
            action = side.timed("lease_next", lease_one)
            taken[side.name].append(action["action_id"])
    for name, ids in taken.items():
        if ids != [f"gated-{number}" for number in range(1, ready + 1)]:
            broken.append(f"{name}: the actions were not leased in the order in which they became ready")
    return broken


def measured(both: list[Side], verb: str) -> tuple[list[Any], list[str]]:
    """One line of the table, and the promise if it is broken."""
    large, small = (side.seconds[verb] for side in both)
    ratio = percentile(large, 0.5) / percentile(small, 0.5)
    milli = [1000 * percentile(each, share) for each in (large, small) for share in (0.5, 0.99)]
    slow = ratio > AT_MOST and verb not in UNLIKE
    broken = [f"{verb}: {ratio:.2f} times the small ledger's median, not {AT_MOST}"] if slow else []
    return [verb, len(large), *milli, ratio], broken


def main(argv: list[str] | None = None) -> int:
    """Fill, lease, measure, explain, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.ledger", description=__doc__)
    parser.add_argument("--ended", type=int, default=ENDED, help=f"actions that have ended ({ENDED})")
    parser.add_argument("--ready", type=int, default=READY, help=f"actions that are ready ({READY})")
    given = parser.parse_args(argv)
    with sides(given.ended, given.ready) as both:
        progress(f"{given.ready} leases on each")
        (plan,) = plans(both[0].engine, lambda: lease_one(both[0], 0.001))[:1]
        lease_one(both[1], 0.001)
        by = {"lease_next": index_of(plan)}
        broken = lease_all(both, given.ready)
        progress(f"{CALLS} calls of every other verb")
        for number in range(CALLS):
            for side in both if number % 2 else both[::-1]:
                for verb, (call, _) in VERBS.items():
                    side.timed(verb, call)
        for verb, (call, _) in VERBS.items():
            by[verb] = index_of(plans(both[0].engine, lambda call=call: call(both[0]))[-1])
        rows = []
        for verb, wanted in {"lease_next": READY_INDEX, **{verb: index for verb, (_, index) in VERBS.items()}}.items():
            row, slow = measured(both, verb)
            rows.append([*row, by[verb].removeprefix("celery_idem_action_")])
            broken += slow + ([] if by[verb] == wanted else [f"{verb} reads by {by[verb]}, not {wanted}"])
    header = ("verb", "calls", "large p50 ms", "p99", "small p50 ms", "p99", "large / small", "index")
    title = f"{given.ended + given.ready} actions, {given.ready} ready, beside the {given.ready} alone"
    return finish(title, f"{table(header, rows)}\n\nlease_next on the large ledger:\n\n{plan}", broken)


if __name__ == "__main__":
    sys.exit(main())
