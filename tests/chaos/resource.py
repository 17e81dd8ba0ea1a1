"""What the bodies act upon: a table in a PostgreSQL nobody hurts, which refuses whoever comes with an old fence.

A body shows its fence when it begins, so an older one is refused from then on, and again with its effect. Bare Celery
has no fences; its bodies come with 0 and nothing is refused.
"""

from __future__ import annotations

import time
from typing import Any

from tests.chaos.history import Event

SCHEMA = """
CREATE TABLE fences (key text PRIMARY KEY, fence bigint NOT NULL);
CREATE TABLE effects (
    id bigserial PRIMARY KEY, key text NOT NULL, attempt text NOT NULL, fence bigint NOT NULL, pid int NOT NULL,
    at float8 NOT NULL, accepted bool NOT NULL, stamped timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE FUNCTION hold(k text, f bigint) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fences VALUES (k, f)
        ON CONFLICT (key) DO UPDATE SET fence = EXCLUDED.fence WHERE fences.fence <= EXCLUDED.fence;
    RETURN FOUND;
END $$;
CREATE FUNCTION effect(k text, a text, f bigint, p int, t float8) RETURNS bool LANGUAGE plpgsql AS $$
DECLARE fits bool := hold(k, f);
BEGIN
    INSERT INTO effects (key, attempt, fence, pid, at, accepted) VALUES (k, a, f, p, t, fits);
    RETURN fits;
END $$;
"""


class Resource:
    """One body's connection to the table."""

    def __init__(self, dsn: str) -> None:
        import psycopg2

        self._connection = psycopg2.connect(dsn)
        self._connection.autocommit = True

    def hold(self, key: str, fence: int) -> bool:
        """Show the fence; whether none higher was shown before."""
        return bool(self._one("SELECT hold(%s, %s)", key, fence))

    def effect(self, key: str, attempt: str, fence: int, pid: int) -> bool:
        """Have the effect, or be refused."""
        return bool(self._one("SELECT effect(%s, %s, %s, %s, %s)", key, attempt, fence, pid, time.monotonic()))

    def effects(self) -> list[Event]:
        """All effects so far as events, in the order the table took them."""
        with self._connection.cursor() as cursor:
            cursor.execute("SELECT at, key, pid, attempt, fence, accepted FROM effects ORDER BY id")
            rows = cursor.fetchall()
        return [
            Event(at, "effect", key, pid, more={"attempt": attempt, "fence": fence, "accepted": accepted})
            for at, key, pid, attempt, fence, accepted in rows
        ]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _one(self, statement: str, *values: Any) -> Any:
        with self._connection.cursor() as cursor:
            cursor.execute(statement, values)
            row = cursor.fetchone()
        return row[0] if row else None


def prepare(dsn: str) -> None:
    """Make tables and functions."""
    resource = Resource(dsn)
    with resource._connection.cursor() as cursor:
        cursor.execute(SCHEMA)
    resource.close()
