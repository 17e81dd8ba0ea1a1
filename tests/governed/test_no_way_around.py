"""What a reviewer tried: each of these hung an action for ever, hid it, or sent when it was too late."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_idem.errors import ActionStoreError, ConfigurationError, GateRefused, StoreUnavailable
from celery_idem.governed import SQLActionStore, approve, message_approval, sweep
from celery_idem.governed.chain import governance_of
from celery_idem.governed.sql.observation import ENDED_AT_ONCE
from tests.governed.refunds import Office


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    office = Office(tmp_path)
    yield office
    office.close()


def raw(office: Office, statement: str, *values: Any) -> None:
    """Write into the ledger's file past the library, as anybody may who can write to it."""
    with closing(sqlite3.connect(office.url.removeprefix("sqlite:///"))) as database, database:
        assert database.execute(statement, values).rowcount == 1


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def through(office: Office, action_id: str, *, most: int = 40) -> str:
    """Deliver what is on the broker, its time come, until the action has ended; the state it ended in."""
    for _ in range(most):
        if office.state(action_id) in {"completed", "failed"}:
            break
        office.next()
    return office.state(action_id)


def test_a_result_that_is_too_deep_to_keep_is_doubt_and_ends(office: Office) -> None:
    deep = nested(16)
    office.till.on_put = lambda request: request.completed(deep)
    office.till.on_look = lambda request: request.completed(deep)
    action_id = office.approved()
    assert through(office, action_id) == "failed"
    assert office.store.get_action(action_id)["result"]["status"] == "ambiguous"
    assert len(office.till.puts) == 1


def test_the_deepest_result_that_is_allowed_is_kept(office: Office) -> None:
    office.till.on_put = office.till.on_look = lambda request: request.completed(nested(15))
    action_id = office.approved()
    assert through(office, action_id) == "completed"
    assert office.store.get_action(action_id)["result"] == nested(15)


@pytest.mark.parametrize("name", ["decision_id", "approval_id", "principal"])
def test_an_approval_with_letters_nobody_can_see_is_refused_when_it_is_given(office: Office, name: str) -> None:
    action = office.store.get_action(office.proposed())
    evidence = message_approval(
        action, principal="ann", channel="web", thread_id="t", event_id="e", decided_at=office.clock()
    )
    with pytest.raises(GateRefused) as refused:
        approve(action["action_id"], evidence | {name: "DEC\u200b1"}, app=office.app)
    assert refused.value.code == "field"
    assert office.state(action["action_id"]) == "proposed"


def test_a_gate_that_no_dispatch_can_name_ends_the_action(office: Office) -> None:
    """Recorded past ``approve``, which would have refused it."""
    action = office.store.get_action(office.proposed())
    evidence = message_approval(
        action, principal="ann", channel="web", thread_id="t", event_id="e", decided_at=office.clock()
    )
    office.store.gate(action["action_id"], evidence | {"decision_id": "DEC\u00a01"})
    office.clock.advance(200)
    assert sweep(office.app)["enqueued"] == 1
    assert through(office, action["action_id"], most=3) == "failed"
    assert len(office.letters()) == 1
    assert office.till.puts == []


def test_an_approval_that_ends_while_no_worker_knows_the_type_ends_the_action(office: Office) -> None:
    action_id = office.approved(lifetime=600.0)
    office.governance.catalog._types.clear()
    office.next()
    assert office.state(action_id) == "gated"
    office.clock.advance(600)
    assert through(office, action_id, most=3) == "failed"
    assert "expired" in office.error(action_id)


def test_a_contract_that_ends_while_no_worker_knows_the_type_ends_the_action(office: Office) -> None:
    office.till.on_put = office.till.pay_in_silence
    office.till.on_look = office.till.look_away
    action_id = office.approved()
    office.next()
    assert office.state(action_id) == "dispatched"
    office.governance.catalog._types.clear()
    office.clock.advance(1200)
    sweep(office.app)
    assert office.state(action_id) == "failed"
    assert office.store.get_action(action_id)["result"]["status"] == "ambiguous"


def test_an_accepted_action_waits_a_day_for_a_worker_that_knows_the_type(office: Office) -> None:
    action_id = office.approved()
    office.next("dispatch")
    office.next("observe")
    office.governance.catalog._types.clear()
    office.next()
    assert office.state(action_id) == "accepted"
    office.clock.advance(90_000)
    assert through(office, action_id, most=3) == "failed"
    assert "verification" in office.error(action_id)


@pytest.mark.parametrize(
    "key", ["acceptance", "verification", "owner-gate", "dispatch-recovery:x", "dispatch-observation:x:001"]
)
def test_a_receipt_of_ones_own_cannot_take_the_place_of_a_lifes(office: Office, key: str) -> None:
    action_id = office.approved()
    with pytest.raises(ActionStoreError, match="use another key"):
        office.store.add_receipt(action_id, key, "note", "written", {})
    assert through(office, action_id) == "completed"


def test_a_receipt_that_was_put_in_the_way_past_the_library_ends_the_action(office: Office) -> None:
    action_id = office.approved()
    raw(
        office,
        "INSERT INTO celery_idem_action_receipt (action_id, receipt_key, kind, status, evidence, evidence_sha256,"
        " observed_at, created_at) VALUES (?, 'verification', 'note', 'x', '{}', 'x', 1, 1)",
        action_id,
    )
    assert through(office, action_id) == "failed"
    assert len(office.letters()) == 1


def test_an_action_last_touched_by_a_clock_that_was_ahead_is_not_hidden_for_a_year(office: Office) -> None:
    waiting, sent = office.approved("o-1"), office.approved("o-2")
    office.till.on_put = office.till.pay_in_silence
    office.till.on_look = office.till.look_away
    office.clock.advance(31_536_000)
    for action_id in (waiting, sent):
        office.store.gate(action_id, {"note": "a second one, a year ahead"}, receipt_key="later", external_id="x")
    office.clock.advance(-31_536_000)
    sweep(office.app)
    assert {office.state(waiting), office.state(sent)} == {"failed"}
    assert all("clock" in letter for letter in office.letters())


def test_states_that_were_written_by_hand_do_not_make_it_completed(office: Office) -> None:
    action_id = office.approved()
    for state in ("dispatched", "accepted", "verified"):
        raw(office, "UPDATE celery_idem_action SET state = ?, attempt_count = 1 WHERE action_id = ?", state, action_id)
    assert through(office, action_id) == "failed"
    assert "receipts do not show" in office.error(action_id)
    assert office.till.puts == []


def test_an_admission_entry_that_outranks_every_later_one_is_told(office: Office) -> None:
    office.store.create_schema()
    raw(
        office,
        "INSERT INTO celery_idem_action_admission (admission_id, open, reason, actor, changed_at)"
        " VALUES (9223372036854775807, 1, 'x', 'x', 1)",
    )
    with pytest.raises(ActionStoreError, match="outranks"):
        office.store.set_admission(False, "stop", actor="ann")


@pytest.mark.parametrize("name", ["GOVERNED_APPROVAL_KEYS", "celery_governed_approval_keys"])
def test_a_setting_that_celery_does_not_read_is_refused_and_not_passed_over(name: str) -> None:
    app = Celery("shop", set_as_current=False)

    class Settings:
        CELERY_GOVERNED_STORE = "sqlite:///actions.db"

    setattr(Settings, name, {"k1": "00" * 32})
    app.config_from_object(Settings, namespace="CELERY")
    with pytest.raises(ConfigurationError, match="governed_approval_keys is written so that Celery does not"):
        governance_of(app).settings  # noqa: B018


def test_a_worker_that_was_stopped_before_it_sent_and_wakes_too_late_sends_nothing(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    from celery_idem.governed import steps

    stopped = iter([0.0, 61.0])
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic=lambda: next(stopped)))
    action_id = office.approved()
    office.next("dispatch")
    assert office.till.puts == []
    assert office.state(action_id) == "dispatched"
    assert office.till.looks


def test_a_row_that_no_verb_can_name_keeps_no_other_action_waiting(office: Office) -> None:
    action_id = office.approved()
    raw(
        office,
        "INSERT INTO celery_idem_action SELECT ?, 'k2', source, source_ref, action_type, payload, payload_sha256,"
        " state, attempt_count, max_attempts, 0, NULL, NULL, NULL, NULL, 1, 1, NULL, NULL, NULL FROM celery_idem_action"
        " WHERE action_id = ?",
        "a\u200bb",
        action_id,
    )
    office.clock.advance(200)
    assert sweep(office.app)["enqueued"] == 1


def test_thousands_of_actions_to_be_ended_do_not_stand_in_the_way_of_the_next(tmp_path: Path) -> None:
    now = [2_000_000_000.0]
    with SQLActionStore(f"sqlite:///{tmp_path / 'actions.db'}", clock=lambda: now[0]) as store:
        evidence = {"approval_id": "a"}
        for number in range(2 * ENDED_AT_ONCE + 3):
            action = store.propose(f"k{number}", "shop", "t", {"n": number})
            store.gate(action["action_id"], evidence)
            now[0] += 1
        with closing(sqlite3.connect(tmp_path / "actions.db")) as database, database:
            database.execute("DROP TRIGGER celery_idem_action_one_way")
            database.execute("UPDATE celery_idem_action SET payload = '{}' WHERE idempotency_key <> ?", (f"k{number}",))
        leased = store.lease_next("w", lease_seconds=60, states=["gated"])
        assert leased is not None
        assert leased["idempotency_key"] == f"k{number}"
        assert len(store.list_dead_letters()) == number


def test_an_approval_that_ends_in_a_queue_ends_the_action_without_any_step(office: Office) -> None:
    action_id = office.approved(lifetime=600.0)
    office.idem.take()
    office.clock.advance(700)
    assert sweep(office.app) == {"released": 0, "ended": 1, "enqueued": 0, "unpublished": 0}
    assert "gate refused, expired" in office.error(action_id)


def test_a_gate_that_was_changed_after_it_was_used_does_not_hold_up_the_end(office: Office) -> None:
    action_id = office.approved()
    office.next("dispatch")
    office.next("observe")
    with closing(sqlite3.connect(office.url.removeprefix("sqlite:///"))) as database, database:
        database.execute("DROP TRIGGER celery_idem_action_receipt_no_update")
        database.execute("UPDATE celery_idem_action_receipt SET evidence = '{}' WHERE kind = 'gate'")
    office.next()
    assert office.state(action_id) == "accepted"
    office.clock.advance(700)
    assert through(office, action_id, most=3) == "failed"
    assert "verification: no gate" in office.error(action_id)


def test_a_clock_that_was_ahead_is_judged_by_the_hosts_own_too(tmp_path: Path) -> None:
    with SQLActionStore(f"sqlite:///{tmp_path / 'actions.db'}") as store:
        action = store.propose("k", "shop", "t", {})
        store.gate(action["action_id"], {"approval_id": "a"})
        with closing(sqlite3.connect(tmp_path / "actions.db")) as database, database:
            database.execute("UPDATE celery_idem_action SET updated_at = updated_at + 86400")
        assert store.stranded(0.0) == []
        assert store.get_action(action["action_id"])["state"] == "gated"
        with closing(sqlite3.connect(tmp_path / "actions.db")) as database, database:
            database.execute("UPDATE celery_idem_action SET updated_at = updated_at + 172800")
        assert store.stranded(0.0) == []
        assert store.get_action(action["action_id"])["state"] == "failed"


def test_the_steps_need_no_claim_store(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("the claims are away")

    action_id = office.approved()
    monkeypatch.setattr(office.idem.store, "claim", away)
    assert through(office, action_id) == "completed"
    assert len(office.till.puts) == 1
