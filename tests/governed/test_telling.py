"""What is told of an action, to whom, and what never is; and the settings a worker refuses to start with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idem.core.events import EventName
from celery_idem.errors import ConfigurationError
from celery_idem.governed import records, telling
from celery_idem.governed.chain import governance_of, reject
from celery_idem.governed.recovery import SweepStep
from celery_idem.governed.settings import TABLE, GovernedSettings, given_settings
from tests.governed.refunds import REFUND, SECRET, Office

pytest_plugins = ("tests.governed.refunds",)


@pytest.fixture
def signals() -> Any:
    """Names of the signals sent, in order, with their arguments."""
    heard: list[tuple[str, dict[str, Any]]] = []
    receivers = []
    for signal in set(telling.SIGNALS.values()):

        def receive(signal: Any, **arguments: Any) -> None:
            heard.append((signal.name, arguments))

        signal.connect(receive, weak=False)
        receivers.append((signal, receive))
    yield heard
    for signal, receive in receivers:
        signal.disconnect(receive)


def test_every_turn_of_a_life_is_a_signal(office: Office, signals: Any) -> None:
    action_id = office.approved()
    office.idem.run_all()
    assert [name for name, _ in signals] == [
        f"action_{what}" for what in ("proposed", "approved", "dispatched", "accepted", "verified", "completed")
    ]
    _, arguments = signals[-1]
    assert arguments["sender"] is office.app
    assert (arguments["action_id"], arguments["action_type"]) == (action_id, REFUND)
    assert (arguments["event"]["from_state"], arguments["event"]["to_state"]) == ("verified", "completed")


def test_each_bad_end_has_a_signal_of_its_own(office: Office, signals: Any) -> None:
    reject(office.proposed("o-1"), "no", principal="bob", app=office.app)
    office.till.on_put = office.till.refuse
    office.approved("o-2")
    office.idem.run_all()
    office.till.on_put, office.till.on_look = office.till.lose, office.till.look_away
    office.approved("o-3")
    office.idem.run_all()
    ends = [name for name, _ in signals if name in {"action_rejected", "action_failed", "action_ambiguous"}]
    assert ends == ["action_rejected", "action_failed", "action_ambiguous"]


def test_a_receiver_that_raises_changes_nothing(office: Office) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("a receiver of the application's")

    for signal in telling.SIGNALS.values():
        signal.connect(broken)
    try:
        action_id = office.approved()
        office.idem.run_all()
    finally:
        for signal in telling.SIGNALS.values():
            signal.disconnect(broken)
    assert office.state(action_id) == "completed"


def test_it_is_in_the_event_stream_of_the_tasks(office: Office) -> None:
    action_id = office.approved()
    office.idem.run_all()
    told = [event for event in office.shop.events if event.name.value.startswith("ACTION_")]
    happened = [event["event_type"] for event in office.store.list_events(action_id)]
    assert [event.name.value for event in told] == [f"ACTION_{word.upper()}" for word in happened]
    assert not any(event.terminal for event in told)
    first = told[0].fields
    assert first == {
        "action_id": action_id,
        "action_type": REFUND,
        "to_state": "proposed",
        "actor": "proposer",
    }


def test_payloads_results_and_keys_are_never_told(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="celery_idem")
    office.till.on_put = office.till.pay_in_silence
    office.approved("order-Zaphod")
    office.till.on_put = office.till.pay
    office.approved("order-Beeblebrox")
    office.idem.run_all()
    assert "ACTION_COMPLETED" in caplog.text
    for secret in (SECRET, "Zoë", "Zaphod", "Beeblebrox", "'paid'"):
        assert secret not in "\n".join(r.getMessage() for r in caplog.records if r.name == "celery_idem")
    fields = [event.fields for event in office.shop.events if event.name.value.startswith("ACTION_")]
    assert all(SECRET not in repr(each) and "Zaphod" not in repr(each) for each in fields)


def test_a_deferral_under_a_word_of_ones_own_is_told_as_one(office: Office) -> None:
    action_id = office.approved()
    office.store.lease_next("me", lease_seconds=60, states=["gated"], action_ids=[action_id])
    office.store.defer_leased(action_id, "me", "out of hours", 60, event_type="out_of_hours")
    last = office.shop.events[-1]
    assert last.name is EventName.ACTION_DEFERRED
    assert (last.fields["event_type"], last.fields["reason"]) == ("out_of_hours", "out of hours")


def test_there_is_a_name_and_a_list_of_details_for_every_event_type() -> None:
    names = {f"ACTION_{word.upper()}" for word in records.EVENT_TYPES}
    assert {name.value for name in EventName if name.value.startswith("ACTION_")} == names
    assert set(telling.DETAILS) == set(records.EVENT_TYPES)
    assert set(telling.SIGNALS) <= set(records.EVENT_TYPES)


# --- settings --------------------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_table() -> None:
    assert GovernedSettings.load({}).values == {
        "store": None,
        "store_timeout": 5.0,
        "lease": 60.0,
        "sweep_interval": 30.0,
        "sweep_grace": 120.0,
        "approval_keys": None,
    }
    assert all(setting.check(setting.default) is None for setting in TABLE)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"stor": "x"}, "governed_stor is not a setting: did you mean governed_store"),
        ({"colour": "x"}, "governed_colour is not a setting: there are store"),
        ({"lease": 0}, "governed_lease = 0: must be above 0"),
        ({"sweep_interval": -1}, "governed_sweep_interval = -1: must be at least 0"),
        ({"sweep_grace": "soon"}, "governed_sweep_grace = 'soon': must be a number"),
        ({"approval_keys": {}}, "governed_approval_keys = a dict: must map key ids"),
        ({"store": 5}, "governed_store = a int: must be a non-empty string"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        GovernedSettings.load(given)
    assert says in str(refused.value)


def test_settings_are_found_under_a_namespace() -> None:
    app = Celery("django", set_as_current=False)
    app.config_from_object({"CELERY_GOVERNED_STORE": "sqlite:///a.db", "CELERY_GOVERNED_LEASE": 30}, namespace="CELERY")
    assert given_settings(app.conf) == {"store": "sqlite:///a.db", "lease": 30}
    assert "celery_idem.governed.dispatch" in app.tasks


def test_without_a_store_the_error_says_what_to_set() -> None:
    with pytest.raises(ConfigurationError, match="governed_store is not set"):
        _ = governance_of(Celery("none", set_as_current=False)).store


@pytest.mark.parametrize(
    "conf", [{"governed_leese": 5}, {"governed_approval_keys": {"ann": "not a key"}}, {"governed_store": "mongodb://x"}]
)
def test_a_worker_does_not_start_with_wrong_settings(tmp_path: Path, conf: dict[str, Any]) -> None:
    app = Celery("wrong", set_as_current=False)
    app.conf.update({"governed_store": f"sqlite:///{tmp_path}/a.db", **conf})
    parent = type("Parent", (), {"app": app, "steps": []})()
    with pytest.raises(ConfigurationError, match="governed_"):
        SweepStep(parent).start(parent)
