"""What docs/explanation/failures.md calls not covered: each goes wrong exactly as that page says, and no worse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_idem import OutcomeUnknown, Policy, StoreUnavailable
from celery_idem.core.heartbeat import Heartbeat
from celery_idem.core.records import State
from tests.support.delivery import Shop

LEASE, TTL = 60.0, 3_600.0


@pytest.fixture
def shop() -> Iterator[Shop]:
    made = Shop(idempotency_lease=LEASE, idempotency_ttl=TTL, idempotency_store_timeout=1.0)
    yield made
    made.close()


def forget_everything(shop: Shop) -> None:
    """The store loses its data: a failover, an eviction, a restart without AOF."""
    shop.store._records.clear()


def test_a_completion_the_store_forgot_runs_again(shop: Shop) -> None:
    effects: list[int] = []

    @shop.task(name="charge", idempotency=Policy())
    def charge(amount: int) -> int:
        effects.append(amount)
        return amount

    message = shop.send(charge, 50)
    shop.deliver(message)
    forget_everything(shop)
    assert shop.deliver(message).value == 50
    assert effects == [50, 50]
    assert shop.terminal() == ["NEW", "NEW"]


def test_a_completion_finds_the_claim_the_store_forgot_and_is_kept(shop: Shop) -> None:
    """Only the time between the loss and the next renewal or completion is open to a duplicate."""
    effects: list[int] = []

    @shop.task(name="charge", idempotency=Policy())
    def charge(amount: int) -> int:
        effects.append(amount)
        forget_everything(shop)
        return amount

    message = shop.send(charge, 50)
    assert [shop.deliver(message).value, shop.deliver(message).value] == [50, 50]
    assert effects == [50]


def test_a_duplicate_beside_a_forgotten_claim_runs_and_the_earlier_run_then_records_nothing(shop: Shop) -> None:
    effects: list[int] = []
    inner: list[Any] = []

    @shop.task(bind=True, name="charge", idempotency=Policy())
    def charge(self: Any, amount: int) -> str:
        effects.append(amount)
        if len(effects) > 1:
            return "second"
        forget_everything(shop)
        inner.append(shop.deliver(message).value)
        return "first"

    message = shop.send(charge, 50)
    assert shop.deliver(message).value == "second", "what the store kept, not what the late run made"
    assert (effects, inner) == ([50, 50], ["second"])
    assert "LEASE_RECLAIMED_LOSS" in shop.names()


def test_of_two_effects_in_one_body_the_first_is_doubled_by_a_kill_between_them(shop: Shop) -> None:
    effects: list[str] = []

    @shop.task(name="pay", idempotency=Policy())
    def pay() -> str:
        effects.append("debit")
        if effects == ["debit"]:
            raise SystemExit
        effects.append("credit")
        return "paid"

    message = shop.send(pay)
    with pytest.raises(SystemExit):
        shop.deliver(message)
    assert shop.deliver(message).value == "paid"
    assert effects == ["debit", "debit", "credit"]
    assert shop.terminal()[-1] == "LEASE_RECLAIMED", "the second run is told that nobody knows"


def test_a_duplicate_after_the_ttl_is_a_new_operation(shop: Shop) -> None:
    effects: list[int] = []

    @shop.task(name="charge", idempotency=Policy())
    def charge(amount: int) -> int:
        effects.append(amount)
        return amount

    message = shop.send(charge, 50)
    shop.deliver(message)
    shop.clock.advance(TTL - 1)
    shop.deliver(message)
    assert effects == [50]
    shop.clock.advance(2)
    shop.deliver(message)
    assert effects == [50, 50]


def test_a_store_clock_that_jumps_beyond_the_lease_gives_a_live_claim_away(shop: Shop) -> None:
    """The clock of the host under SQLite, or a server's that is set by hand: a leap, not a drift."""
    effects: list[int] = []
    inner: list[Any] = []

    @shop.task(bind=True, name="charge", idempotency=Policy())
    def charge(self: Any, amount: int) -> str:
        effects.append(self.idempotency.attempt)
        if len(effects) > 1:
            return "second"
        shop.clock.advance(LEASE + 1)
        inner.append(shop.deliver(message).value)
        return "first"

    message = shop.send(charge, 50)
    assert shop.deliver(message).value == "second"
    assert (effects, inner) == ([1, 2], ["second"])


def test_a_clock_that_goes_back_keeps_a_dead_claim_for_longer_and_doubles_nothing(shop: Shop) -> None:
    effects: list[int] = []

    @shop.task(name="charge", idempotency=Policy())
    def charge(amount: int) -> int:
        effects.append(amount)
        return amount

    message = shop.send(charge, 50)
    shop.deliver(message)
    shop.clock.advance(-86_400)
    assert shop.deliver(message).value == 50
    assert effects == [50]


def test_a_completion_nobody_heard_leaves_an_unknown_outcome_for_the_next_copy(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is away from the completion until the lease is over, and then the process ends: the claim lapses."""
    effects: list[int] = []

    @shop.task(name="charge", idempotency=Policy(on_unknown="fail", lease=0.2))
    def charge(amount: int) -> int:
        effects.append(amount)
        return amount

    def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("complete: no answer", may_have_landed=False)

    monkeypatch.setattr(Heartbeat, "complete_later", lambda *_: None)  # the process ended before the store was back
    message = shop.send(charge, 50)
    with monkeypatch.context() as patched:
        patched.setattr(shop.store, "complete", away)
        assert shop.deliver(message).value == 50
    assert "COMPLETE_FAILED" in shop.names()
    shop.clock.advance(LEASE)
    assert isinstance(shop.deliver(message).value, OutcomeUnknown)
    assert effects == [50]


def test_another_key_is_another_operation_whatever_it_does(shop: Shop) -> None:
    effects: list[int] = []

    @shop.task(name="charge", idempotency=Policy(key="order:{order}:{note}"))
    def charge(order: int, note: str) -> None:
        effects.append(order)

    shop.deliver(shop.send(charge, 7, "now"))
    shop.deliver(shop.send(charge, 7, "now "))
    assert effects == [7, 7]
    assert {record.state for record in shop.store._records.values()} == {State.COMPLETED}


def test_a_body_that_waits_for_a_message_of_its_own_key_would_wait_for_ever(shop: Shop) -> None:
    """The message is parked for as long as the body runs, so whoever waits for it in the body gets nothing."""
    inner: list[Any] = []

    @shop.task(name="charge", idempotency=Policy(key="order:{order}"))
    def charge(order: int) -> int:
        other = shop.send(charge, order)
        inner.extend(shop.deliver(other).state for _ in range(2))
        return order

    assert shop.deliver(shop.send(charge, 7)).value == 7
    assert inner == ["IGNORED", "IGNORED"]
    assert shop.terminal() == ["NEW", "PARKED", "PARKED"]
