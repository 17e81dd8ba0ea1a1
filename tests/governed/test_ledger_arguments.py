"""What callers bring and should not: each refused before anything is written, by the argument's name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from celery_idem.errors import ActionNotFound, ActionStoreError, ConfigurationError, StoreUnavailable
from celery_idem.governed import SQLActionStore
from tests.governed.ledgers import (
    OWNER,
    TABLES,
    VALID,
    Ledger,
    accept,
    approval,
    at,
    dispatch,
    dispatched,
    execution_of,
    gated,
    lease,
    look,
    on_each_database,
    proposed,
)

pytest_plugins = ("tests.governed.ledgers",)

TEXTS = ["", " ", "x" * 513, "a\0b", "a\nb", "\ud800", 5, b"x", [], {}, True, object()]
"""What is no text that a database can keep and people can read."""
NUMBERS = [math.nan, math.inf, -math.inf, -1, "1", True, None, [], 10**400, 2j]
"""What is no number of seconds."""
LISTS = ["gated", 5, None, [5], [["gated"]], {"gated": 1}, [None], ["a\0b"], object()]
"""What is no list of texts."""
WHOLES = [0, -1, 10_001, 1.0, "1", True, None, []]
"""What is no size of a page."""

Verb = Callable[[SQLActionStore, str, Any], Any]


def lease_next(store: SQLActionStore, **given: Any) -> Any:
    return store.lease_next(**{"owner": "w", "lease_seconds": 60, "states": ["gated"], **given})


def lease_look(store: SQLActionStore, **given: Any) -> Any:
    return store.lease_dispatched_observation(**{"owner": "w", "lease_seconds": 60, **given})


def approve(store: SQLActionStore, **given: Any) -> Any:
    """Approve the one action that is proposed."""
    action_id = store.find("proposed")[0]["action_id"]
    return store.approve(action_id, approval(store, action_id), **{"chain_id": "c", **given})


def begin(store: SQLActionStore, action_id: str, **given: Any) -> Any:
    return dispatch(store, action_id, **given)


CASES: dict[str, tuple[Verb, str, list[Any]]] = {
    "propose(idempotency_key=)": (lambda s, _, v: proposed(s, idempotency_key=v), "idempotency_key", [*TEXTS, None]),
    "propose(source=)": (lambda s, _, v: proposed(s, source=v), "source", [*TEXTS, None]),
    "propose(action_type=)": (lambda s, _, v: proposed(s, action_type=v), "action_type", [*TEXTS, None]),
    "propose(source_ref=)": (lambda s, _, v: proposed(s, source_ref=v), "source_ref", TEXTS),
    "propose(action_id=)": (lambda s, _, v: proposed(s, action_id=v), "action_id", TEXTS),
    "propose(actor=)": (lambda s, _, v: proposed(s, actor=v), "actor", [*TEXTS, None]),
    "gate(action_id)": (lambda s, _, v: s.gate(v, {}), "action_id", [*TEXTS, None]),
    "gate(evidence)": (lambda s, a, v: s.gate(a, v, receipt_key="k"), "evidence", [math.nan, {1: 2}, "x" * 70_000]),
    "gate(receipt_key=)": (lambda s, a, v: s.gate(a, {}, receipt_key=v), "receipt_key", [*TEXTS, None]),
    "gate(external_id=)": (lambda s, a, v: s.gate(a, {}, receipt_key="k", external_id=v), "external_id", TEXTS),
    "gate(actor=)": (lambda s, a, v: s.gate(a, {}, actor=v), "actor", [*TEXTS, None]),
    "approve(evidence)": (lambda s, a, v: s.approve(a, v, chain_id="c"), "evidence", ["x", 5, None, [], b"x"]),
    "approve(chain_id=)": (lambda s, _, v: approve(s, chain_id=v), "chain_id", [*TEXTS, None]),
    "approve(receipt_key=)": (lambda s, _, v: approve(s, receipt_key=v), "receipt_key", [*TEXTS, None]),
    "reject(reason)": (lambda s, a, v: s.reject(a, v, actor="a"), "reason", [*TEXTS, None]),
    "reject(actor=)": (lambda s, a, v: s.reject(a, "r", actor=v), "actor", [*TEXTS, None]),
    "add_receipt(receipt_key)": (lambda s, a, v: s.add_receipt(a, v, "note", "x", {}), "receipt_key", TEXTS),
    "add_receipt(kind)": (lambda s, a, v: s.add_receipt(a, "k", v, "x", {}), "kind", [*TEXTS, None]),
    "add_receipt(status)": (lambda s, a, v: s.add_receipt(a, "k", "note", v, {}), "status", [*TEXTS, None]),
    "add_receipt(observed_at=)": (
        lambda s, a, v: s.add_receipt(a, "k", "note", "x", {}, observed_at=v),
        "observed_at",
        [each for each in NUMBERS if each is not None] + [1e11 + 1],
    ),
    "lease_next(owner)": (lambda s, _, v: lease_next(s, owner=v), "owner", [*TEXTS, None]),
    "lease_next(lease_seconds=)": (
        lambda s, _, v: lease_next(s, lease_seconds=v),
        "lease_seconds",
        [*NUMBERS, 0, 86_401],
    ),
    "lease_next(states=)": (lambda s, _, v: lease_next(s, states=v), "states", [*LISTS, [], ["dispatched"], ["x"]]),
    "lease_next(states=), with one too many": (
        lambda s, _, v: lease_next(s, states=v),
        "dispatched is only looked at",
        [["gated", "dispatched"], ["proposed"], ["completed"]],
    ),
    "lease_dispatched_observation(lease_seconds=)": (
        lambda s, _, v: lease_look(s, lease_seconds=v),
        "lease_seconds",
        [*NUMBERS, 0],
    ),
    "begin(observation_window_seconds=)": (
        lambda s, a, v: begin(s, a, observation_window_seconds=v),
        "observation_window_seconds",
        [*NUMBERS, 0, 0.5, 3601],
    ),
    "begin(max_observations=)": (
        lambda s, a, v: begin(s, a, max_observations=v),
        "max_observations",
        [0, -1, 101, 1.0, "1", True, None],
    ),
    "begin(expected_execution_digest=)": (
        lambda s, a, v: begin(s, a, expected_execution_digest=v),
        "expected_execution_digest",
        ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "0" * 64 + "\n", None, b"0" * 64],
    ),
    "begin(gate_validator=)": (lambda s, a, v: begin(s, a, gate_validator=v), "gate_validator", [None, "x", {}]),
    "begin(expected_payload=)": (
        lambda s, a, v: begin(s, a, expected_payload=v),
        "expected_payload",
        [math.nan, {1: 2}, object()],
    ),
    "begin(expected_source=)": (lambda s, a, v: begin(s, a, expected_source=v), "expected_source", TEXTS),
    "begin(expected_approval_id=)": (
        lambda s, a, v: begin(s, a, expected_approval_id=v),
        "expected_approval_id",
        TEXTS,
    ),
    "defer_leased(delay_seconds)": (
        lambda s, a, v: s.defer_leased(a, OWNER, "r", v),
        "delay_seconds",
        [*NUMBERS, 86_401],
    ),
    "defer_leased(event_type=)": (
        lambda s, a, v: s.defer_leased(a, OWNER, "r", 1, event_type=v),
        "event_type",
        [*TEXTS, None, "completed", "dispatched", "gated", "rejected", "ambiguous"],
    ),
    "set_admission(is_open)": (
        lambda s, _, v: s.set_admission(v, "r", actor="a"),
        "is_open",
        ["closed", None, 0, 1, [], "False"],
    ),
    "set_admission(reason)": (lambda s, _, v: s.set_admission(False, v, actor="a"), "reason", [*TEXTS, None]),
    "set_admission(actor=)": (lambda s, _, v: s.set_admission(False, "r", actor=v), "actor", [*TEXTS, None]),
    "stranded(grace)": (lambda s, _, v: s.stranded(v), "grace", NUMBERS),
    "stranded(limit=)": (lambda s, _, v: s.stranded(1, limit=v), "limit", WHOLES),
    "find(limit=)": (lambda s, _, v: s.find(limit=v), "limit", WHOLES),
    "find(state)": (lambda s, _, v: s.find(v), "state", [*TEXTS, "done"]),
    "find(source)": (lambda s, _, v: s.find(source=v), "source", TEXTS),
    "find(action_type)": (lambda s, _, v: s.find(action_type=v), "action_type", TEXTS),
    "list_dead_letters(limit=)": (lambda s, _, v: s.list_dead_letters(limit=v), "limit", WHOLES),
    "list_dead_letters(after=)": (lambda s, _, v: s.list_dead_letters(after=v), "after", TEXTS),
    "replace_chain(new_chain_id)": (lambda s, a, v: s.replace_chain(a, None, v), "chain_id", [*TEXTS, None]),
}
for name, verb in {
    "lease_next": lease_next,
    "lease_dispatched_observation": lease_look,
    "recover_expired_leases": lambda store, **scope: store.recover_expired_leases(**scope),
}.items():
    CASES |= {
        f"{name}({argument}=)": (lambda s, _, v, verb=verb, argument=argument: verb(s, **{argument: v}), argument, bad)
        for argument, bad in {
            "source": TEXTS,
            "source_prefix": TEXTS,
            "action_type": TEXTS,
            "action_ids": [each for each in LISTS if each is not None],
        }.items()
    }


def everything(ledger: Ledger) -> dict[str, list[Any]]:
    return {table: ledger.run(f"SELECT * FROM {table} ORDER BY 1") for table in TABLES}


@on_each_database
@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name_and_nothing_is_written(ledger: Ledger, store: SQLActionStore, case: str) -> None:
    verb, named, values = CASES[case]
    action_id = at(store, "gated")
    proposed(store)
    for value in values:
        before = everything(ledger)
        with pytest.raises(ActionStoreError) as caught:
            verb(store, action_id, value)
        assert named in str(caught.value), (value, str(caught.value))
        assert len(str(caught.value)) < 400
        assert everything(ledger) == before


def test_the_bounds_of_a_number_are_allowed(store: SQLActionStore) -> None:
    for window, looks in ((1, 1), (3600, 100)):
        dispatched(store, observation_window_seconds=window, max_observations=looks)
    for delay in (0, 86_400):
        action_id = gated(store)
        assert lease(store, action_id) is not None
        assert store.defer_leased(action_id, OWNER, "later", delay)["state"] == "gated"
    for moment in (0, 1e11):
        assert (
            store.add_receipt(action_id, f"at {moment}", "note", "x", {}, observed_at=moment)["observed_at"] == moment
        )


@on_each_database
def test_every_verb_refuses_an_id_that_is_none(ledger: Ledger, store: SQLActionStore) -> None:
    good = approval(store, proposed(store))
    verbs: list[Callable[[Any], Any]] = [
        store.get_action,
        store.list_receipts,
        store.list_events,
        lambda bad: store.gate(bad, good),
        lambda bad: store.approve(bad, good, chain_id="c"),
        lambda bad: store.reject(bad, "r", actor="a"),
        lambda bad: store.add_receipt(bad, "k", "note", "x", {}),
        lambda bad: store.defer_leased(bad, OWNER, "r", 1),
        lambda bad: store.begin_dispatched_observation(bad, OWNER, "d"),
        lambda bad: store.defer_dispatched_observation(bad, OWNER, "d", "k", "r", 1),
        lambda bad: store.accept(bad, OWNER, "k", "note", {}),
        lambda bad: store.verify(bad, OWNER, "k", {}, qualifying_receipt_keys=["k"]),
        lambda bad: store.complete(bad, OWNER, {}),
        lambda bad: store.fail_attempt(bad, OWNER, "e", False),
        lambda bad: store.replace_chain(bad, None, "c"),
    ]
    before = everything(ledger)
    for verb in verbs:
        for bad in [*TEXTS, None]:
            with pytest.raises(ActionStoreError, match=r"^action_id = ") as caught:
                verb(bad)
            assert not isinstance(caught.value, ActionNotFound)
    assert everything(ledger) == before


@on_each_database
def test_every_verb_that_needs_a_lease_refuses_an_owner_that_is_none(store: SQLActionStore) -> None:
    action_id = at(store, "dispatched")
    digest = execution_of(action_id)
    verbs: list[Callable[[Any], Any]] = [
        lambda bad: store.defer_leased(action_id, bad, "r", 1),
        lambda bad: store.begin_dispatched_observation(action_id, bad, digest),
        lambda bad: store.defer_dispatched_observation(action_id, bad, digest, "k", "r", 1),
        lambda bad: store.accept(action_id, bad, "k", "note", {}),
        lambda bad: store.verify(action_id, bad, "k", {}, qualifying_receipt_keys=["k"]),
        lambda bad: store.complete(action_id, bad, {}),
        lambda bad: store.fail_attempt(action_id, bad, "e", False),
        lambda bad: dispatch(store, at(store, "gated"), bad),
    ]
    for verb in verbs:
        for bad in [*TEXTS, None]:
            with pytest.raises(ActionStoreError, match=r"^owner = "):
                verb(bad)


@on_each_database
def test_what_is_recorded_of_an_effect_must_be_json(ledger: Ledger, store: SQLActionStore) -> None:
    accepted, verified, dispatched = (at(store, state) for state in ("accepted", "verified", "dispatched"))
    before = everything(ledger)
    for bad in (math.nan, {1: 2}, object(), "x" * 70_000, "\0", "\ud800", 2**70, {"a": {1}}):
        with pytest.raises(ActionStoreError, match=r"^evidence"):
            store.accept(dispatched, OWNER, "k", "note", bad)
        with pytest.raises(ActionStoreError, match=r"^result"):
            store.accept(dispatched, OWNER, "k", "note", {}, result=bad)
        with pytest.raises(ActionStoreError, match=r"^evidence"):
            store.verify(accepted, OWNER, "k", bad, qualifying_receipt_keys=["acceptance"])
        with pytest.raises(ActionStoreError, match=r"^result"):
            store.complete(verified, OWNER, bad)
    for keys in ("acceptance", [], None, 5, [5], [["acceptance"]], (key for key in ["acceptance"])):
        with pytest.raises(ActionStoreError, match="qualifying_receipt_keys"):
            store.verify(accepted, OWNER, "k", {}, qualifying_receipt_keys=keys)  # type: ignore[arg-type]
    with pytest.raises(ActionStoreError, match=r"has no receipt 'other'"):
        store.verify(accepted, OWNER, "k", {}, qualifying_receipt_keys=["acceptance", "other"])
    assert everything(ledger) == before


@on_each_database
@pytest.mark.parametrize("text", ["a\0b", "\ud800", "x" * 100_000, "", None, "two\n lines\t", b"\xff", {"a": 1}])
def test_no_reason_keeps_an_action_open(store: SQLActionStore, text: Any) -> None:
    for state in ("gated", "dispatched"):
        failed = store.fail_attempt(at(store, state), OWNER, text, retryable=False)
        assert failed["state"] == "failed"
        assert 0 < len(failed["last_error"]) <= 2000
        assert failed["last_error"].isprintable()
    assert store.defer_leased(at(store, "gated"), OWNER, text, 1)["lease_owner"] is None
    action_id = at(store, "dispatched")
    _, receipt = look(store, action_id)
    deferred = store.defer_dispatched_observation(
        action_id, OWNER, execution_of(action_id), receipt["receipt_key"], text, 1
    )
    assert deferred["state"] == "dispatched"
    last = at(store, "dispatched")
    for _ in range(3):
        _, receipt = look(store, last)
    ended = store.defer_dispatched_observation(last, OWNER, execution_of(last), receipt["receipt_key"], text, 1)
    assert ended["result"]["reason"] == "exhausted"


def test_source_and_prefix_exclude_each_other_and_a_prefix_is_no_pattern(store: SQLActionStore) -> None:
    for verb in (lease_next, lease_look, lambda s, **scope: s.recover_expired_leases(**scope)):
        with pytest.raises(ActionStoreError, match="source and source_prefix exclude each other"):
            verb(store, source="a", source_prefix="b")
    for source in ("shop.eu", "shop_eu", "shopXeu"):
        store.gate(proposed(store, source=source), {})
    found = [lease_next(store, source_prefix="shop_") for _ in range(2)]
    assert [action and action["source"] for action in found] == ["shop_eu", None]
    assert lease_next(store, source_prefix="shop%") is None
    assert lease_next(store, action_ids=[]) is None
    assert lease_next(store, source="shop.eu", action_type="other") is None
    assert lease_next(store, source="shop.eu", action_type="payments.refund")["source"] == "shop.eu"


def test_an_owner_may_be_anything_people_can_read(store: SQLActionStore) -> None:
    for owner in ("Zoë's worker, 2 of 3", "x" * 512, "%s", "'; --", ":name", "?"):
        action_id = proposed(store)
        store.gate(action_id, approval(store, action_id))
        assert lease_next(store, owner=owner, action_ids=[action_id])["lease_owner"] == owner
        assert dispatch(store, action_id, owner, gate_validator=VALID)["state"] == "dispatched"
        assert accept(store, action_id, owner, external_id="%s ? :x")[1]["external_id"] == "%s ? :x"


# --- where the ledger is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://localhost/x", r"governed_store: no SQL store on mysql: use postgresql:// or sqlite:///"),
        ("redis://localhost/0", r"governed_store: .*redis"),
        ("sqlite://", r"governed_store: .*name a file: sqlite:///path"),
        ("sqlite:///:memory:", r"governed_store: .*name a file"),
        ("", r"governed_store"),
        ("no url", r"governed_store"),
        ("postgresql+nodriver://localhost/x", r"governed_store: .*install the driver"),
        ("postgresql+psycopg2://localhost:port/x", r"governed_store"),
    ],
)
def test_a_url_that_leads_to_no_ledger_is_told_by_the_setting(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        SQLActionStore(url).find()
    assert "idempotency_store" not in str(caught.value)


def test_a_server_that_is_not_there_is_told_by_the_setting() -> None:
    store = SQLActionStore("postgresql+psycopg2://nobody@127.0.0.1:1/none", timeout=2)
    with pytest.raises(StoreUnavailable, match=r"check that it runs and that governed_store names it") as caught:
        proposed(store)
    assert caught.value.may_have_landed is False
    assert "idempotency_store" not in str(caught.value)
