"""What becomes of a body's writes and of its claim, row by row, through Celery's real tracer on a SQLite store."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery.exceptions import Ignore, Reject
from sqlalchemy.exc import IntegrityError, InvalidRequestError
from sqlalchemy.orm import Session

from celery_idem import ConfigurationError, LeaseLost, Policy, ResultUnavailable, current
from celery_idem.app import runtime_of
from celery_idem.core.heartbeat import Heartbeat
from celery_idem.core.records import Answer, Delivery, Kind, Operation, State
from celery_idem.stores.sql import SQLStore
from celery_idem.testing import Delivered
from tests.support.delivery import Shop

ORDER = Policy(key="order:{order}", fingerprint=["order"])


class Ledger(Shop):
    """A shop whose store is a file with a ledger in it."""

    def __init__(self, file: Path, **conf: Any) -> None:
        super().__init__(**conf)
        self.file = file
        self.sql = SQLStore(f"sqlite:///{file}", timeout=30, clock=self.clock)
        self.sql.create_schema()
        self.idem.runtime._store = self.sql
        with sqlite3.connect(file) as connection:
            connection.execute("CREATE TABLE owner (id INTEGER PRIMARY KEY)")
            connection.execute(
                "CREATE TABLE ledger (amount INTEGER, owner INTEGER REFERENCES owner DEFERRABLE INITIALLY DEFERRED)"
            )
        connection.close()

    def amounts(self) -> list[int]:
        """What is committed."""
        connection = sqlite3.connect(self.file)
        try:
            return [row[0] for row in connection.execute("SELECT amount FROM ledger")]
        finally:
            connection.close()

    def states(self) -> list[State]:
        return [record.state for record in self.sql.find()]

    def leases(self) -> int:
        """How many claims the heartbeat renews."""
        heartbeat = runtime_of(self.app)._heartbeat
        return 0 if heartbeat is None else len(heartbeat)

    def open_connections(self) -> int:
        """Connections of the transaction pool that somebody has."""
        pool: Any = self.sql._database.transacting().pool
        return int(pool.checkedout())


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Ledger]:
    shop = Ledger(tmp_path / "shop.db")
    yield shop
    assert shop.open_connections() == 0
    shop.close()


def write(connection: Any, amount: int, owner: int | None = None) -> None:
    connection.execute(sa.text("INSERT INTO ledger VALUES (:amount, :owner)"), {"amount": amount, "owner": owner})


def charging(shop: Ledger, then: Any = lambda: "paid", **options: Any) -> Any:
    """A task that writes 50 and then does the rest."""

    @shop.task(bind=True, **{"idempotency": ORDER, **options})
    def charge(self: Any, order: int) -> Any:
        with self.idempotency.transaction() as connection:
            write(connection, 50)
        return then()

    return charge


def deliver(shop: Ledger, task: Any, order: int = 1) -> Delivered:
    return shop.deliver(shop.send(task, order))


# -- ends of a body ----------------------------------------------------------------------------------------------------


def test_it_commits_when_the_body_returns_and_not_before(shop: Ledger) -> None:
    seen: list[Any] = []
    charge = charging(shop, lambda: seen.append((shop.amounts(), shop.states())) or "paid")
    assert deliver(shop, charge).value == "paid"
    assert seen == [([], [State.CLAIMED])]
    assert (shop.amounts(), shop.states(), shop.leases()) == ([50], [State.COMPLETED], 0)
    again = deliver(shop, charge)
    assert (again.state, again.value, shop.amounts()) == ("SUCCESS", "paid", [50])
    assert shop.names() == ["NEW", "REPLAYED"]


def raising(error: BaseException) -> Any:
    def raises() -> None:
        raise error

    return raises


def test_an_exception_of_the_body_takes_it_back(shop: Ledger) -> None:
    charge = charging(shop, raising(ValueError("declined")))
    assert deliver(shop, charge).state == "FAILURE"
    assert (shop.amounts(), shop.states(), shop.leases()) == ([], [State.RELEASED], 0)
    shop.terminal()
    assert deliver(shop, charge).state == "FAILURE"  # a new message runs: nothing had happened
    assert shop.terminal() == ["NEW", "NEW"]


def test_a_failure_that_is_replayed_is_stored_without_what_was_written(shop: Ledger) -> None:
    policy = Policy(replay_failures=(ValueError,)).over(ORDER)
    charge = charging(shop, raising(ValueError("declined")), idempotency=policy)
    assert deliver(shop, charge).state == "FAILURE"
    assert (shop.amounts(), shop.states()) == ([], [State.COMPLETED])
    assert deliver(shop, charge).state == "FAILURE"
    assert shop.terminal() == ["NEW", "REPLAYED"]


def test_ignore_commits(shop: Ledger) -> None:
    charge = charging(shop, raising(Ignore()))
    assert deliver(shop, charge).state == "IGNORED"
    assert (shop.amounts(), shop.states()) == ([50], [State.COMPLETED])
    assert deliver(shop, charge).state == "IGNORED"
    assert shop.amounts() == [50]


def test_reject_takes_it_back(shop: Ledger) -> None:
    charge = charging(shop, raising(Reject("later")))
    assert deliver(shop, charge).state == "REJECTED"
    assert (shop.amounts(), shop.states()) == ([], [State.RELEASED])


def test_an_exit_takes_it_back_and_leaves_a_doubt(shop: Ledger) -> None:
    charge = charging(shop, raising(SystemExit(1)))
    message = shop.send(charge, 1)
    with pytest.raises(SystemExit):
        shop.deliver(message)
    (record,) = shop.sql.find()
    assert (shop.amounts(), record.state, record.unknown) == ([], State.RELEASED, True)


def test_what_a_verify_wrote_before_it_failed_is_taken_back(shop: Ledger) -> None:
    def verify(order: int) -> None:
        running = current()
        assert running is not None
        with running.transaction() as connection:
            write(connection, 1)
        raise KeyError(order)

    ends: list[Any] = [SystemExit(1), None]

    @shop.task(bind=True, idempotency=Policy(key="order:{order}", verify=verify))
    def charge(self: Any, order: int) -> str:
        with self.idempotency.transaction() as connection:
            write(connection, 50)
        end = ends.pop(0)
        if end is not None:
            raise end
        return "paid"

    message = shop.send(charge, 1)
    with pytest.raises(SystemExit):
        shop.deliver(message)
    assert shop.deliver(message).value == "paid"
    assert shop.amounts() == [50]


@pytest.mark.parametrize("throw", [True, False])
def test_a_retry_takes_it_back(shop: Ledger, throw: bool) -> None:
    @shop.task(bind=True, idempotency=ORDER)
    def charge(self: Any, order: int) -> str:
        with self.idempotency.transaction() as connection:
            write(connection, self.request.retries)
        if self.request.retries == 0:
            self.retry(countdown=0, throw=throw)
        return "paid"

    deliver(shop, charge)
    assert (shop.amounts(), shop.states()) == ([], [State.RELEASED])
    (successor,) = shop.messages()
    assert shop.deliver(successor).value == "paid"
    assert (shop.amounts(), shop.states()) == ([1], [State.COMPLETED])


def test_a_value_that_cannot_be_kept_keeps_the_effect(shop: Ledger) -> None:
    charge = charging(shop, lambda: {1, 2}, serializer="json", ignore_result=True)
    message = shop.send(charge, 1, link=charge.si(2))  # somebody reads the value
    shop.deliver(message)
    assert shop.amounts() == [50]
    assert "ENCODE_FAILED" in shop.names()
    again = shop.deliver(message)
    assert again.state == "FAILURE"
    assert isinstance(again.value, ResultUnavailable)
    assert shop.amounts() == [50]


def test_a_message_that_continues_is_settled(shop: Ledger) -> None:
    charge = charging(shop)
    message = shop.send(charge, 1, link=charge.si(2))
    assert shop.deliver(message).value == "paid"
    (linked,) = shop.messages()
    (record,) = shop.sql.find()
    assert record.note(message["id"]).settled
    assert shop.leases() == 0
    assert shop.deliver(message).value == "paid"
    assert shop.messages() == []  # the link was published once
    assert shop.deliver(linked).value == "paid"
    assert shop.amounts() == [50, 50]


# -- in and around the with statement ----------------------------------------------------------------------------------


def test_an_exception_that_leaves_the_with_takes_it_back(shop: Ledger) -> None:
    leases: list[int] = []

    @shop.task(bind=True, idempotency=ORDER)
    def charge(self: Any, order: int) -> str:
        leases.append(shop.leases())
        with suppress(KeyError), self.idempotency.transaction() as connection:
            write(connection, 1)
            leases.append(shop.leases())
            raise KeyError
        leases.append(shop.leases())
        if order == 2:
            with self.idempotency.transaction() as connection:
                write(connection, 2)
        return "went on"

    assert deliver(shop, charge).value == "went on"
    assert (shop.amounts(), shop.states()) == ([], [State.COMPLETED])
    assert leases == [1, 0, 1]  # locked, it needs no renewal
    assert deliver(shop, charge, 2).value == "went on"
    assert shop.amounts() == [2]


def test_entered_again_it_is_the_same_transaction(shop: Ledger) -> None:
    seen: list[Any] = []

    @shop.task(bind=True, idempotency=ORDER)
    def charge(self: Any, order: int) -> str:
        with self.idempotency.transaction() as first:
            write(first, 1)
            with self.idempotency.transaction() as nested:
                write(nested, 2)
            with suppress(KeyError), self.idempotency.transaction() as nested:
                write(nested, 3)
                raise KeyError
        with suppress(KeyError), current().transaction() as later:  # type: ignore[union-attr]
            write(later, 4)
            raise KeyError
        with self.idempotency.transaction() as last:
            write(last, 5)
        seen.append((first is nested is later is last, shop.amounts()))
        return "paid"

    assert deliver(shop, charge).value == "paid"
    assert seen == [(True, [])]
    assert shop.amounts() == [1, 2, 5]


def test_a_direct_call_in_a_body_is_part_of_it(shop: Ledger) -> None:
    inner = charging(shop)

    @shop.task(bind=True, idempotency=ORDER)
    def outer(self: Any, order: int) -> str:
        inner(order)
        assert shop.amounts() == []
        if order == 2:
            raise ValueError("declined")
        return "paid"

    assert deliver(shop, outer, 2).state == "FAILURE"
    assert shop.amounts() == []
    assert deliver(shop, outer, 1).state == "SUCCESS"
    assert shop.amounts() == [50]


def test_the_orm_works_on_it(shop: Ledger) -> None:
    class Base(sa.orm.DeclarativeBase):
        pass

    class Entry(Base):
        __table__ = sa.Table("ledger", Base.metadata, sa.Column("amount", sa.Integer, primary_key=True))

    @shop.task(bind=True, idempotency=ORDER)
    def charge(self: Any, order: int) -> str:
        with self.idempotency.transaction() as connection, Session(bind=connection) as session:
            session.add(Entry(amount=7))
            session.commit()
            session.add(Entry(amount=8))
            session.commit()
            assert shop.amounts() == []
        if order == 2:
            raise ValueError("declined")
        return "paid"

    assert deliver(shop, charge, 2).state == "FAILURE"
    assert shop.amounts() == []
    assert deliver(shop, charge).value == "paid"
    assert shop.amounts() == [7, 8]


def ends(connection: Any) -> dict[str, Any]:
    def swallowed() -> None:
        with pytest.raises(InvalidRequestError, match="leave commit"):
            connection.commit()

    return {
        "commit": connection.commit,
        "commit, swallowed": swallowed,
        "rollback": connection.rollback,
        "close": connection.close,
        "ORM rollback": lambda: Session(bind=connection).__enter__().connection().rollback(),
    }


@pytest.mark.parametrize("how", ["commit", "commit, swallowed", "rollback", "close", "ORM rollback"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
def test_the_body_may_not_end_it_by_itself(shop: Ledger, how: str, inside: bool) -> None:
    went_on: list[bool] = []

    @shop.task(bind=True, idempotency=ORDER)
    def charge(self: Any, order: int) -> str:
        with self.idempotency.transaction() as connection:
            write(connection, 50)
            if inside:
                ends(connection)[how]()
        went_on.append(True)
        if not inside:
            ends(connection)[how]()
        return "paid"

    came = deliver(shop, charge)
    assert came.state == "FAILURE"
    assert isinstance(came.value, InvalidRequestError)
    assert bool(went_on) is not inside
    assert (shop.amounts(), shop.states(), shop.leases()) == ([], [State.RELEASED], 0)


@pytest.mark.parametrize("statement", ["INSERT OR ROLLBACK INTO owner VALUES (1)", "ROLLBACK"])
@pytest.mark.parametrize("more", [False, True])
def test_what_a_statement_rolled_back_is_not_taken_for_written(shop: Ledger, statement: str, more: bool) -> None:
    """What the body writes after it, the driver puts into a new transaction."""

    @shop.task(bind=True, idempotency=ORDER)
    def charge(self: Any, order: int) -> str:
        with self.idempotency.transaction() as connection:
            write(connection, 50)
            connection.execute(sa.text("INSERT INTO owner VALUES (1)"))
            with suppress(IntegrityError):
                connection.execute(sa.text(statement))
            if more:
                write(connection, 60)
        return "paid"

    came = deliver(shop, charge)
    assert came.state == "FAILURE"
    assert isinstance(came.value, InvalidRequestError)
    assert (shop.amounts(), shop.states(), shop.leases()) == ([], [State.RELEASED], 0)


@pytest.mark.parametrize("joined", [False, True])
def test_a_with_that_is_never_left_is_not_taken_for_written(shop: Ledger, joined: bool) -> None:
    @shop.task(bind=True, idempotency=ORDER)
    def charge(self: Any, order: int) -> str:
        def lent() -> Iterator[Any]:
            with self.idempotency.transaction() as connection:
                yield connection

        if joined:
            with self.idempotency.transaction():
                pass
        generator = lent()
        write(next(generator), 50)
        return "paid"

    came = deliver(shop, charge)
    assert came.state == "FAILURE"
    assert isinstance(came.value, ConfigurationError)
    assert (shop.amounts(), shop.states(), shop.leases()) == ([], [State.RELEASED], 0)


def test_a_commit_the_database_refuses_is_the_tasks_failure(shop: Ledger) -> None:
    @shop.task(bind=True, idempotency=ORDER)
    def charge(self: Any, order: int) -> str:
        with self.idempotency.transaction() as connection:
            connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
            write(connection, 50, owner=99)
        return "paid"

    check_keys(shop)
    came = deliver(shop, charge)
    assert came.state == "FAILURE"
    assert isinstance(came.value, IntegrityError)
    assert (shop.amounts(), shop.states(), shop.leases()) == ([], [State.RELEASED], 0)


def check_keys(shop: Ledger) -> None:
    @sa.event.listens_for(shop.sql._database.transacting(), "connect")
    def connected(driver: Any, _record: Any) -> None:
        driver.execute("PRAGMA foreign_keys=ON")


def test_a_replacement_is_sent_before_the_commit_and_a_refused_one_does_not_take_it_back(shop: Ledger) -> None:
    told: list[str] = []

    @shop.task(name="ship")
    def ship() -> None:
        told.append("replacement")

    @shop.task(name="failed")
    def failed() -> None:
        told.append("errback")

    @shop.task(bind=True, idempotency=ORDER)
    def charge(self: Any, order: int) -> None:
        with self.idempotency.transaction() as connection:
            connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
            write(connection, 50, owner=99)
        self.replace(ship.si())

    check_keys(shop)
    charge.apply_async((1,), link_error=failed.si())
    shop.idem.run_all()
    assert (sorted(told), shop.amounts()) == (["errback", "replacement"], [])


def test_after_the_body_there_is_no_transaction(shop: Ledger) -> None:
    kept: list[Any] = []

    @shop.task(bind=True, idempotency=ORDER)
    def charge(self: Any, order: int) -> str:
        kept.append(self.idempotency)
        return "paid"

    deliver(shop, charge)
    with pytest.raises(ConfigurationError, match="over"), kept[0].transaction():
        pass


# -- the claim ---------------------------------------------------------------------------------------------------------


def test_a_lapsed_lease_is_nobodys_to_take(shop: Ledger) -> None:
    answers: list[Answer] = []
    other = SQLStore(f"sqlite:///{shop.file}", timeout=0.3, clock=shop.clock)

    def then() -> str:
        shop.clock.advance(1000)
        (record,) = other.find()
        operation = Operation(record.key, Delivery("other"), "t")
        answers.append(other.claim(operation, lease=60, ttl=60).answer)
        return "paid"

    assert deliver(shop, charging(shop, then)).value == "paid"
    assert answers == [Answer.HELD]
    assert (shop.amounts(), shop.states()) == ([50], [State.COMPLETED])
    other.close()


def steal(shop: Ledger) -> None:
    """Another worker takes the key, whose lease has lapsed, runs to its end and completes."""
    other = SQLStore(f"sqlite:///{shop.file}", clock=shop.clock)
    shop.clock.advance(1000)
    (record,) = other.find()
    claim = other.claim(Operation(record.key, Delivery("thief"), "t"), lease=60, ttl=60).claim
    assert claim is not None
    engine = runtime_of(shop.app)._engines.popitem()[1]
    assert other.complete(claim, _outcome(engine, "theirs"))
    other.close()


def _outcome(engine: Any, value: Any) -> Any:
    from celery_idem.core.records import Outcome

    return Outcome(Kind.RESULT, engine.encode(Kind.RESULT, value))


@pytest.mark.parametrize("on_lease_lost", ["stop", "continue"])
def test_a_run_that_lost_its_key_gets_no_transaction(shop: Ledger, on_lease_lost: Any) -> None:
    @shop.task(bind=True, idempotency=Policy(on_lease_lost=on_lease_lost).over(ORDER))
    def charge(self: Any, order: int) -> str:
        steal(shop)
        try:
            with self.idempotency.transaction() as connection:
                write(connection, 50)
        except LeaseLost:
            if on_lease_lost == "stop":
                raise
        return "mine"

    came = deliver(shop, charge)
    assert (came.state, came.value) == ("SUCCESS", "theirs")
    assert shop.amounts() == []
    assert "LEASE_LOST" in shop.names()


def test_a_key_lost_while_it_is_taken_back_is_noticed(shop: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    # A renewal that began before the transaction may wait for the file too, and be there before the thief.
    monkeypatch.setattr(Heartbeat, "beat", lambda *_: None)

    @shop.task(bind=True, idempotency=Policy(lease=0.001).over(ORDER))
    def charge(self: Any, order: int) -> str:
        try:
            with self.idempotency.transaction() as connection:
                write(connection, 50)
                thread = threading.Thread(target=steal, args=(shop,))
                thread.start()  # it waits for the file, and has the key the moment the file is free
                raise KeyError
        finally:
            thread.join()

    @sa.event.listens_for(shop.sql._database.transacting(), "checkin")
    def give_way(_driver: Any, _record: Any) -> None:
        for thread in threading.enumerate():
            if thread.name.endswith("(steal)"):
                thread.join()

    came = deliver(shop, charge)
    assert (came.state, came.value, shop.amounts()) == ("SUCCESS", "theirs", [])


# -- where there is nothing to complete --------------------------------------------------------------------------------


def test_a_direct_call_commits_at_the_end_of_the_with(shop: Ledger) -> None:
    seen: list[Any] = []
    charge = charging(shop, lambda: seen.append(shop.amounts()) or "paid")
    assert charge(1) == "paid"
    assert (seen, shop.states()) == ([[50]], [])


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_without_protection_it_commits_at_the_end_of_the_with(tmp_path: Path, mode: str) -> None:
    shop = Ledger(tmp_path / "shop.db", idempotency_mode=mode)
    seen: list[Any] = []

    @shop.task(bind=True, idempotency=ORDER)
    def charge(self: Any, order: int) -> str:
        with suppress(KeyError), self.idempotency.transaction() as connection:
            write(connection, 1)
            raise KeyError
        with self.idempotency.transaction() as connection:
            write(connection, 2)
            with self.idempotency.transaction() as nested:
                write(nested, 3)
        seen.append(shop.amounts())
        raise ValueError("declined")

    message = shop.send(charge, 1)
    assert shop.deliver(message).state == "FAILURE"
    assert shop.deliver(message).state == "FAILURE"
    assert seen == [[2, 3], [2, 3, 2, 3]]
    assert shop.open_connections() == 0
    shop.close()


@pytest.mark.parametrize("policy", [Policy(ttl=0), Policy(cacheable=bool)], ids=["ttl", "cacheable"])
def test_a_task_that_keeps_no_outcome_is_refused(shop: Ledger, policy: Policy) -> None:
    came = deliver(shop, charging(shop, idempotency=policy.over(ORDER)))
    assert came.state == "FAILURE"
    assert "leave ttl=0 and cacheable out" in str(came.value)
    assert shop.amounts() == []


def test_a_store_that_is_no_database_is_refused() -> None:
    shop = Shop()
    task = charging(shop)  # type: ignore[arg-type]
    came = shop.deliver(shop.send(task, 1))
    assert came.state == "FAILURE"
    assert isinstance(came.value, ConfigurationError)
    assert "idempotency_store is memory" in str(came.value)
    with pytest.raises(ConfigurationError, match="idempotency_store"):
        task(1)
    shop.close()
