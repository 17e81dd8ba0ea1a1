"""A Django project in one file, run as a process of its own: ``python django_ledger.py <SQLAlchemy URL> <another>``.

Django's database is the store's, except where a scenario is about that. Every scenario starts with empty tables.
"""

from __future__ import annotations

import sys
from typing import Any

import django
from celery import Celery
from celery.exceptions import Ignore
from django.conf import settings
from sqlalchemy import make_url

from celery_idem import ConfigurationError, IdempotentTask, Policy
from celery_idem.app import close_all, runtime_of
from celery_idem.contrib.django import django_transaction
from celery_idem.core.records import State
from celery_idem.stores.base import open_store

URL, OTHER = sys.argv[1:3]


def database(url: str, **options: Any) -> dict[str, Any]:
    place = make_url(url)
    if place.get_backend_name() == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": place.database, "OPTIONS": options}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": place.database,
        "USER": place.username,
        "HOST": place.host,
        "PORT": place.port,
        "OPTIONS": options,
    }


if "psycopg2" in URL:
    sys.modules["psycopg"] = None  # type: ignore[assignment]  # as if it were not installed: Django falls back
settings.configure(
    DATABASES={"default": database(URL), "other": database(OTHER)},
    USE_TZ=True,
)
django.setup()

from django.db import IntegrityError, connection, connections, models, transaction  # noqa: E402
from django.db.transaction import TransactionManagementError  # noqa: E402


class Entry(models.Model):
    amount = models.IntegerField(unique=True)

    class Meta:
        app_label = "shop"


app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
app.conf.update(idempotency_store=URL, idempotency_wait_timeout=0)
ORDER = Policy(key="order:{order}")
then: dict[int, Any] = {}


def amounts() -> list[int]:
    """What is committed, seen by a connection of its own."""
    outside = connections["default"].copy()
    try:
        with outside.cursor() as cursor:
            cursor.execute("SELECT amount FROM shop_entry ORDER BY amount")
            return [row[0] for row in cursor.fetchall()]
    finally:
        outside.close()


def states() -> list[State]:
    return [record.state for record in runtime_of(app).store.find()]


@app.task(base=IdempotentTask, bind=True, idempotency=ORDER)
def charge(self: Any, order: int) -> str:
    with django_transaction(self.idempotency):
        Entry.objects.create(amount=order)
    result: str = then.get(order, lambda: "paid")()
    return result


def raising(error: BaseException) -> Any:
    def raises() -> None:
        raise error

    return raises


# -- scenarios ---------------------------------------------------------------------------------------------------------


def commits_with_the_completion() -> None:
    told: list[Any] = []

    def looks() -> str:
        transaction.on_commit(lambda: told.append((amounts(), states())))
        assert (amounts(), told, connection.in_atomic_block) == ([], [], True)
        return "paid"

    then[1] = looks
    assert charge.apply((1,)).get() == "paid"
    assert told == [([1], [State.COMPLETED])]
    assert charge.apply((1,)).get() == "paid"
    assert (amounts(), len(told), connection.in_atomic_block, connection.get_autocommit()) == ([1], 1, False, True)


def ignore_commits() -> None:
    then[1] = raising(Ignore())
    for _ in range(2):
        assert charge.apply((1,)).state == "IGNORED"
    assert amounts() == [1]


def rolls_back_with_the_body() -> None:
    then[1] = raising(ValueError("declined"))
    assert charge.apply((1,)).state == "FAILURE"
    assert (amounts(), states(), connection.in_atomic_block) == ([], [State.RELEASED], False)
    then.clear()
    assert charge.apply((1,)).get() == "paid"
    assert amounts() == [1]


def entered_again_it_is_the_same() -> None:
    @app.task(base=IdempotentTask, bind=True, idempotency=ORDER)
    def twice(self: Any, order: int) -> str:
        with django_transaction(self.idempotency):
            Entry.objects.create(amount=1)
        try:
            with django_transaction(self.idempotency):
                Entry.objects.create(amount=2)
                Entry.objects.create(amount=1)
        except IntegrityError:
            pass
        with django_transaction(self.idempotency), transaction.atomic():
            Entry.objects.create(amount=3)
        assert amounts() == []
        return "paid"

    assert twice.apply((1,)).get() == "paid"
    assert amounts() == [1, 3]


def a_hook_that_raises_fails_nobody() -> None:
    then[1] = lambda: transaction.on_commit(raising(ValueError("mail server"))) or "paid"
    assert charge.apply((1,)).get() == "paid"
    assert (amounts(), states()) == ([1], [State.COMPLETED])


def a_swallowed_error_is_not_lost() -> None:
    def swallows() -> str:
        try:
            with transaction.atomic(savepoint=False):
                raise ValueError
        except ValueError:
            pass
        return "paid"

    then[1] = swallows
    came = charge.apply((1,))
    assert isinstance(came.result, TransactionManagementError), came.result
    assert (amounts(), states(), connection.in_atomic_block) == ([], [State.RELEASED], False)


def a_closed_connection_is_not_a_commit() -> None:
    then[1] = lambda: connection.close() or "paid"
    came = charge.apply((1,))
    assert isinstance(came.result, TransactionManagementError), came.result
    assert (amounts(), states()) == ([], [State.RELEASED])
    then.clear()
    assert charge.apply((2,)).get() == "paid"
    assert amounts() == [2]


def an_open_atomic_block_is_refused() -> None:
    with transaction.atomic():
        came = charge.apply((1,))
    assert isinstance(came.result, ConfigurationError), came.result
    assert "open already" in str(came.result)
    assert amounts() == []


def another_database_is_refused() -> None:
    @app.task(base=IdempotentTask, bind=True, idempotency=ORDER)
    def elsewhere(self: Any, order: int) -> None:
        with django_transaction(self.idempotency, using="other"):
            raise AssertionError

    for ready in (False, True):
        if ready:
            open_store(OTHER).create_schema()
        came = elsewhere.apply((1,))
        assert isinstance(came.result, ConfigurationError), came.result
        assert "another database" in str(came.result)
    assert states() == [State.RELEASED]


def two_connections_are_refused() -> None:
    @app.task(base=IdempotentTask, bind=True, idempotency=ORDER)
    def both(self: Any, order: int) -> None:
        with django_transaction(self.idempotency):
            Entry.objects.create(amount=order)
        with self.idempotency.transaction():
            raise AssertionError

    came = both.apply((1,))
    assert isinstance(came.result, ConfigurationError), came.result
    assert "another connection" in str(came.result)
    assert amounts() == []


def a_direct_call_commits_at_the_end_of_the_with() -> None:
    then[1] = lambda: f"paid {amounts()}"
    assert charge(1) == "paid [1]"
    with transaction.atomic():  # as in a TestCase
        then[2] = lambda: "paid"
        assert charge(2) == "paid"
        transaction.set_rollback(True)
    assert (amounts(), states()) == ([1], [])


def serializable_serves_too() -> None:
    if connection.vendor == "sqlite":
        return
    connections.databases["default"]["OPTIONS"]["isolation_level"] = 3 if "psycopg2" in URL else 4
    connections.close_all()
    del connections["default"]

    def renewed() -> str:
        with connections["default"].cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            return str(cursor.fetchone()[0])

    then[1] = renewed
    assert charge.apply((1,)).get() == "serializable"
    assert amounts() == [1]


SCENARIOS = [
    commits_with_the_completion,
    ignore_commits,
    rolls_back_with_the_body,
    entered_again_it_is_the_same,
    a_hook_that_raises_fails_nobody,
    a_swallowed_error_is_not_lost,
    a_closed_connection_is_not_a_commit,
    an_open_atomic_block_is_refused,
    another_database_is_refused,
    two_connections_are_refused,
    a_direct_call_commits_at_the_end_of_the_with,
    serializable_serves_too,
]


def main() -> None:
    store = open_store(URL, timeout=30)
    store.create_schema()
    with connection.schema_editor() as editor:
        editor.create_model(Entry)
    for scenario in SCENARIOS:
        print(scenario.__name__, flush=True)
        Entry.objects.all().delete()
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM celery_idem_record")
        then.clear()
        scenario()
    print("all held with", type(connections["default"].connection).__module__.partition(".")[0])
    close_all()
    connections.close_all()


if __name__ == "__main__":
    main()
