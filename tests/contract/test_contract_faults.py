"""Rule S6: lost replies, silent and absent servers, and records that somebody's transaction locks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from celery_idem.core.records import Answer, Claim, Ended, Release, Renewal, State, Successor
from celery_idem.errors import StoreUnavailable
from celery_idem.stores.base import Store
from tests.contract.backends import Backend, PostgresBackend, SQLiteBackend, on, on_postgres, on_servers
from tests.contract.shorthand import LEASE, TTL, answer, complete, stored, take
from tests.support.chaos_proxy import ChaosProxy
from tests.support.operations import answered, key_for, op, result
from tests.support.processes import LOOPBACK, free_port, wait_until

TIMEOUT = 5.0
SHORT = 0.4  # seconds of a timeout that is waited out again and again
MARGIN = 6.0  # seconds a machine may add that is loaded, or stands still now and then
PATIENT = 30.0  # seconds of a timeout of a store that is expected not to wait at all
AT_ONCE = 10.0  # seconds within which what waits for nobody answers on such a machine


@pytest.fixture
def proxy(backend: Backend) -> Iterator[ChaosProxy]:
    """A proxy in front of the backend's server."""
    with ChaosProxy.before(backend.url) as between:
        yield between


@pytest.fixture
def far(backend: Backend, proxy: ChaosProxy) -> Store:
    """The store behind the proxy, connected, and its server knows every script and statement."""
    store = backend.open(url=proxy.url(backend.url), timeout=TIMEOUT)
    complete(store, op("warm"))
    store.release(take(store, op("warmer")), Release.ENDED)
    return store


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail a block that takes longer."""
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < seconds, f"took {took:.2f} s, not {seconds:g}"


def with_lost_reply(proxy: ChaosProxy, verb: Callable[[], Any], *, after: int) -> StoreUnavailable | None:
    """Make a call whose answer is lost after some replies; the error, or None where it needed no more of them."""
    proxy.drop_replies(after)
    try:
        verb()
    except StoreUnavailable as error:
        return error
    finally:
        proxy.heal()
    return None


# -- lost replies ------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("S6")
@pytest.mark.guarantee("row 3")
@on_servers
def test_s6_a_claim_whose_reply_was_lost_may_be_asked_for_again(
    proxy: ChaosProxy, far: Store, real_store: Store
) -> None:
    landed = 0
    for after in range(4):
        operation = op(f"k{after}")
        lost = with_lost_reply(proxy, lambda o=operation: far.claim(o, lease=LEASE, ttl=TTL), after=after)
        record = real_store.get(operation.key)
        if lost is not None and record is not None:
            landed += 1
            assert lost.may_have_landed is True
            assert record.token == operation.token
        again = far.claim(operation, lease=LEASE, ttl=TTL)
        assert (again.answer, again.claim.attempts if again.claim else None) == (Answer.ACQUIRED, 1)
        assert again.claim is not None
        assert record is None or again.claim.fence == record.fence
        assert real_store.complete(again.claim, result()) is Ended.COMPLETED
    assert landed >= 1
    assert proxy.dropped >= 1


@pytest.mark.guarantee("S6")
@on_servers
def test_s6_a_reclaim_whose_reply_was_lost_may_be_asked_for_again(
    proxy: ChaosProxy, far: Store, real_store: Store
) -> None:
    landed = 0
    for after in range(5):
        dead = take(real_store, op(f"k{after}"))
        mine = op(f"k{after}", "N")
        lost = with_lost_reply(
            proxy, lambda o=mine, f=dead.fence: far.claim(o, lease=LEASE, ttl=TTL, dead_fence=f), after=after
        )
        if stored(real_store, f"k{after}").token == mine.token and lost is not None:
            landed += 1
            assert lost.may_have_landed is True
        again = far.claim(mine, lease=LEASE, ttl=TTL, dead_fence=dead.fence)
        assert again.answer is Answer.RECLAIMED
        assert again.claim is not None
        assert (again.claim.attempts, again.claim.unknown) == (2, True)
    assert landed >= 1


@pytest.mark.guarantee("S6")
@pytest.mark.guarantee("complete")
@on_servers
def test_s6_a_completion_whose_reply_was_lost_may_be_repeated(proxy: ChaosProxy, far: Store, real_store: Store) -> None:
    landed = 0
    for after in range(4):
        claim = take(far, op(f"k{after}"))
        lost = with_lost_reply(proxy, lambda c=claim: far.complete(c, result()), after=after)
        if stored(real_store, f"k{after}").state is State.COMPLETED and lost is not None:
            landed += 1
            assert lost.may_have_landed is True
            assert far.release(claim, Release.INTERRUPTED) is Ended.COMPLETED
        assert far.complete(claim, result()) is Ended.COMPLETED
        assert stored(real_store, f"k{after}").outcome == result()
    assert landed >= 1


@pytest.mark.guarantee("S6")
@pytest.mark.guarantee("release")
@on_servers
def test_s6_a_release_whose_reply_was_lost_may_be_repeated(proxy: ChaosProxy, far: Store, real_store: Store) -> None:
    landed = 0
    for after in range(4):
        claim = take(far, op(f"k{after}"))
        lost = with_lost_reply(
            proxy, lambda c=claim: far.release(c, Release.RETRY, successor=Successor(1, 50)), after=after
        )
        before = stored(real_store, f"k{after}")
        if before.state is State.RELEASED and lost is not None:
            landed += 1
            assert lost.may_have_landed is True
        assert far.release(claim, Release.RETRY, successor=Successor(1, 50)) is Ended.RELEASED
        assert answer(real_store, op(f"k{after}")) is Answer.NOT_DUE
    assert landed >= 1


# -- servers that are silent, absent or back again ---------------------------------------------------------------------


def every_verb(store: Store, claim: Claim) -> dict[str, Callable[[], Any]]:
    return {
        "claim": lambda: store.claim(op("another"), lease=LEASE, ttl=TTL),
        "complete": lambda: store.complete(claim, result()),
        "release": lambda: store.release(claim, Release.ENDED),
        "renew": lambda: store.renew([claim]),
        "settle": lambda: store.settle(claim.key, "M"),
        "note_parked": lambda: store.note_parked(claim.key, "M", 0, 1),
        "get": lambda: store.get(claim.key),
        "find": lambda: list(store.find()),
        "forget": lambda: store.forget(claim.key, claim.fence),
    }


@pytest.mark.guarantee("S6")
@on_servers
def test_s6_no_verb_outlives_its_timeout_on_a_silent_server(
    backend: Backend, proxy: ChaosProxy, real_store: Store
) -> None:
    claim = take(real_store)
    verbs = every_verb(backend.open(url=proxy.url(backend.url), timeout=SHORT), claim)
    for name, verb in verbs.items():
        if name == "settle":  # half of them meet the silence with a connection they had, the others while connecting
            wait_until(lambda verb=verb: answered(verb), 20, "an answer through the proxy")
        proxy.blackhole = True
        with within(SHORT + MARGIN), pytest.raises(StoreUnavailable):
            verb()
        proxy.cut()
        proxy.blackhole = False
    assert stored(real_store).token == claim.token


@pytest.mark.guarantee("S6")
@on_servers
def test_s6_nothing_landed_where_nobody_listens(backend: Backend, real_store: Store) -> None:
    claim = take(real_store)
    parts = backend.url.rpartition("@") if "@" in backend.url else backend.url.partition("://")
    port = backend.url.rpartition(":")[2].partition("/")[0]
    absent = f"{parts[0]}{parts[1]}" + parts[2].replace(f":{port}", f":{free_port()}")
    store = backend.open(url=absent, timeout=TIMEOUT)
    for name, verb in every_verb(store, claim).items():
        with within(TIMEOUT + MARGIN), pytest.raises(StoreUnavailable) as caught:
            verb()
        assert caught.value.may_have_landed is False, name


@pytest.mark.guarantee("S6")
@on_servers
def test_s6_a_store_recovers_when_its_server_is_back(proxy: ChaosProxy, far: Store) -> None:
    claim = take(far)
    proxy.refuse = True
    proxy.cut()
    for _ in range(2):
        with within(TIMEOUT + MARGIN), pytest.raises(StoreUnavailable):
            far.claim(op("another"), lease=LEASE, ttl=TTL)
    proxy.heal()

    def answers() -> bool:
        try:
            return far.renew([claim]) == {claim.token: Renewal.RENEWED}
        except StoreUnavailable:
            return False

    with within(TIMEOUT + MARGIN):
        wait_until(answers, 20, "the store answers again")
    assert far.complete(claim, result()) is Ended.COMPLETED


@pytest.mark.guarantee("S6")
@on_servers
def test_s6_an_error_tells_no_credentials(backend: Backend) -> None:
    scheme, _, rest = backend.url.partition("://")
    path = rest.rpartition("/")[2]
    store = backend.open(url=f"{scheme}://someone:s3cr3t-pw@{LOOPBACK}:{free_port()}/{path}", timeout=TIMEOUT)
    with pytest.raises(StoreUnavailable) as caught:
        store.get(key_for("order:1"))
    error: BaseException | None = caught.value
    while error is not None:
        assert "s3cr3t-pw" not in str(error)
        error = error.__cause__
    assert "s3cr3t-pw" not in repr(store)


# -- locked records ----------------------------------------------------------------------------------------------------


@contextmanager
def locked_row(backend: PostgresBackend, key: str) -> Iterator[None]:
    """Hold a row as a body does that completes within its own transaction."""
    with backend.connection() as connection:
        cursor = connection.cursor()
        cursor.execute("BEGIN")
        cursor.execute("SELECT 1 FROM celery_idem_record WHERE key = %s FOR UPDATE", (key,))
        assert cursor.rowcount == 1
        yield
        cursor.execute("ROLLBACK")


@pytest.mark.guarantee("S6")
@pytest.mark.guarantee("S8")
@pytest.mark.guarantee("renew")
@on_postgres
def test_s8_one_locked_row_starves_no_other_claim(backend: PostgresBackend, real_store: Store) -> None:
    claims = [take(real_store, op(f"k{n}")) for n in range(10)]
    locked, patient = claims[3], backend.open(timeout=PATIENT)
    with locked_row(backend, locked.key):
        with within(AT_ONCE):
            assert answer(patient, op("k3", "N")) is Answer.HELD
        with within(AT_ONCE):
            answers = patient.renew(claims)
        assert answers.pop(locked.token) is Renewal.BUSY
        assert set(answers.values()) == {Renewal.RENEWED}
        assert len(answers) == 9
        with within(AT_ONCE):
            assert take(patient, op("fresh")).answer is Answer.ACQUIRED
            assert patient.complete(claims[0], result()) is Ended.COMPLETED
            assert patient.release(claims[1], Release.ENDED) is Ended.RELEASED
            assert stored(patient, "k3").token == locked.token
            assert len(list(patient.find())) == 11
            patient.purge(10)
    assert real_store.renew([locked]) == {locked.token: Renewal.RENEWED}


@pytest.mark.guarantee("S6")
@on_postgres
def test_s6_a_lapsed_claim_in_somebodys_transaction_is_held(backend: PostgresBackend, real_store: Store) -> None:
    """The lock protects it better than a lease would: its body is about to complete it."""
    claim, patient = take(real_store, lease=0.05), backend.open(timeout=PATIENT)
    wait_until(lambda: stored(real_store).lease_expires_at < time.time() - 0.1, 10, "the lease lapses")
    with locked_row(backend, claim.key):
        for dead_fence in (None, claim.fence):
            with within(AT_ONCE):
                assert answer(patient, op(message="N"), dead_fence=dead_fence) is Answer.HELD
    assert answer(real_store, op(message="N")) is Answer.RECLAIMED


@pytest.mark.guarantee("S6")
@on_postgres
def test_s6_a_locked_completion_is_replayed_all_the_same(backend: PostgresBackend, real_store: Store) -> None:
    claim, patient = complete(real_store), backend.open(timeout=PATIENT)
    with locked_row(backend, claim.key):
        with within(AT_ONCE):
            assert answer(patient, op()) is Answer.COMPLETED
        with within(AT_ONCE):
            assert answer(patient, op(continues=True)) is Answer.HELD
    assert answer(real_store, op(continues=True)) is Answer.COMPLETED


@pytest.mark.guarantee("S6")
@on_postgres
def test_s6_ending_a_locked_claim_waits_no_longer_than_the_timeout(backend: PostgresBackend, real_store: Store) -> None:
    hasty = backend.open(timeout=SHORT)
    claims = [take(real_store, op(name)) for name in ("complete", "release", "parked")]
    verbs: list[Callable[[Store], Any]] = [
        lambda store: store.complete(claims[0], result()),
        lambda store: store.release(claims[1], Release.ENDED),
        lambda store: store.note_parked(claims[2].key, "M", 0, 1),
    ]
    for claim, verb in zip(claims, verbs, strict=True):
        with locked_row(backend, claim.key), within(SHORT + MARGIN), pytest.raises(StoreUnavailable):
            verb(hasty)
        verb(real_store)
    assert stored(real_store, "complete").state is State.COMPLETED
    assert stored(real_store, "release").state is State.RELEASED
    assert stored(real_store, "parked").note("M").parked == (0, 1)


@pytest.mark.guarantee("S6")
@on_postgres
def test_s6_a_record_being_inserted_by_a_transaction_that_hangs(backend: PostgresBackend, real_store: Store) -> None:
    """Nobody can see that record yet: the claim waits no longer than the timeout.

    The server may still write it once the transaction is gone, so the same token asks again and is answered.
    """
    store, patient, mine = backend.open(timeout=3), backend.open(timeout=PATIENT), op()
    wait_until(lambda: answered(lambda: store.get(mine.key)), 20, "a connection")
    with backend.connection() as connection:
        cursor = connection.cursor()
        cursor.execute("BEGIN")
        cursor.execute(
            "INSERT INTO celery_idem_record (key, rev, state, token, fence) VALUES (%s, 1, 'CLAIMED', 't', 1)",
            (key_for("order:1"),),
        )
        with within(3 + MARGIN), pytest.raises(StoreUnavailable) as caught:
            store.claim(mine, lease=LEASE, ttl=TTL)
        assert caught.value.may_have_landed is True
        with within(AT_ONCE):
            assert take(patient, op("another")).answer is Answer.ACQUIRED
        cursor.execute("ROLLBACK")
    claim = take(real_store, mine)
    assert (claim.answer, claim.attempts) == (Answer.ACQUIRED, 1)


@pytest.mark.guarantee("S6")
@on("sqlite")
def test_s6_sqlite_a_file_somebody_writes_to_is_read_and_waited_for_in_time(
    backend: SQLiteBackend, real_store: Store
) -> None:
    store, patient = backend.open(timeout=SHORT), backend.open(timeout=PATIENT)
    complete(real_store, op("completed"))
    claim = take(real_store, op("claimed"))
    with backend.connection() as connection:
        connection.execute("BEGIN IMMEDIATE")
        with within(AT_ONCE):
            assert answer(patient, op("completed")) is Answer.COMPLETED
            assert answer(patient, op("claimed", "N")) is Answer.HELD
            assert stored(patient, "claimed").token == claim.token
        with within(SHORT + MARGIN), pytest.raises(StoreUnavailable) as caught:
            store.claim(op("fresh"), lease=LEASE, ttl=TTL)
        assert caught.value.may_have_landed is False
        with within(SHORT + MARGIN):
            assert store.renew([claim]) == {claim.token: Renewal.BUSY}
        with within(SHORT + MARGIN), pytest.raises(StoreUnavailable) as caught:
            store.complete(claim, result())
        assert caught.value.may_have_landed is False
        connection.execute("ROLLBACK")
    assert take(real_store, op("fresh")).answer is Answer.ACQUIRED
    assert real_store.complete(claim, result()) is Ended.COMPLETED
