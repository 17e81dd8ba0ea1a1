"""The sweep: what lost its worker or its message goes on, in one lineage, whatever else is down."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from celery_idem.errors import ActionFailed, StoreUnavailable
from celery_idem.governed import SQLActionStore
from celery_idem.governed import recovery as recovery_module
from celery_idem.governed.chain import new_chain, sweeps_of
from celery_idem.governed.recovery import Sweeper, sweep
from tests.governed.refunds import Office
from tests.support.processes import wait_until

pytest_plugins = ("tests.governed.refunds",)

NOTHING = {"released": 0, "ended": 0, "enqueued": 0, "unpublished": 0}


def test_a_lost_message_is_published_again_after_the_grace(office: Office) -> None:
    action_id = office.approved()
    office.idem.take()  # lost
    assert sweep(office.app) == NOTHING
    office.idem.advance(121)
    assert sweep(office.app) == {**NOTHING, "enqueued": 1}
    office.idem.run_all()
    assert office.state(action_id) == "completed"
    assert len(office.till.puts) == 1
    assert sweep(office.app) == NOTHING


@pytest.mark.parametrize("step", ["observe", "verify", "complete"])
def test_the_message_of_any_step_may_be_lost(office: Office, step: str) -> None:
    action_id = office.approved()
    while office.idem.messages()[0].task != f"celery_idem.governed.{step}":
        office.next()
    office.idem.take()
    office.idem.advance(121)
    assert sweep(office.app)["enqueued"] == 1
    office.idem.run_all()
    assert office.state(action_id) == "completed"
    assert len(office.till.puts) == 1


def test_each_sweep_of_one_action_doubles_its_grace(office: Office) -> None:
    office.approved(lifetime=86_400)
    swept = []
    for _ in range(30 * 4):  # sweeps for four hours, and no message is ever delivered
        office.idem.advance(120)
        if sweep(office.app)["enqueued"]:
            swept.append(office.clock.now)
            office.idem.take()
    pauses = [round(b - a) for a, b in itertools.pairwise(swept)]
    assert pauses == [240, 480, 960, 1920, 3840, 3840]


def test_many_sweeps_leave_one_lineage(office: Office) -> None:
    office.till.on_put, office.till.on_look = office.till.lose, office.till.look_away
    action_id = office.approved(lifetime=86_400)
    for _ in range(8):  # a long queue: everything stays where it is
        office.idem.advance(1000)
        sweep(office.app)
    messages = office.idem.take()
    assert len(messages) >= 4
    office.store.set_admission(False, "everybody has to wait", actor="ops")
    for message in messages:
        office.idem.deliver(message)
    (waiting,) = office.idem.messages()
    assert waiting["args"] == [action_id, office.store.get_action(action_id)["chain_id"]]
    office.store.set_admission(True, "go on", actor="ops")
    office.idem.run_all()
    assert len(office.till.puts) == 1


def test_an_approval_that_ends_in_a_queue_ends_its_action(office: Office) -> None:
    action_id = office.approved(lifetime=600)
    office.idem.advance(601 + 120)
    assert sweep(office.app) == {**NOTHING, "ended": 1}
    assert "expired" in office.error(action_id)
    (late,) = office.idem.take()
    assert isinstance(office.idem.deliver(late).value, ActionFailed)
    assert office.till.puts == []


def test_two_sweeps_at_once_publish_one_chain(office: Office) -> None:
    for order in range(20):
        office.approved(f"o-{order}")
    office.idem.take()
    office.idem.advance(121)
    start, counts = threading.Barrier(4), []

    def run() -> None:
        start.wait()
        counts.append(sweep(office.app)["enqueued"])

    sweeps = [threading.Thread(target=run) for _ in range(4)]
    for thread in sweeps:
        thread.start()
    for thread in sweeps:
        thread.join()
    assert sum(counts) == 20
    assert len(office.idem.messages()) == 20
    office.idem.run_all()
    assert len(office.till.puts) == 20


def test_what_waits_for_its_time_is_not_lost(office: Office) -> None:
    office.store.set_admission(False, "not now", actor="ops")
    office.approved(lifetime=86_400)
    for _ in range(10):
        office.next("dispatch")
        assert sweep(office.app) == NOTHING


def test_a_lapsed_lease_is_released_and_the_action_goes_on(office: Office) -> None:
    action_id = office.approved()
    office.idem.take()
    office.store.lease_next("dead", lease_seconds=60, states=["gated"], action_ids=[action_id])
    office.idem.advance(61)
    assert sweep(office.app) == {**NOTHING, "released": 1}
    office.idem.advance(121)
    assert sweep(office.app)["enqueued"] == 1
    office.idem.run_all()
    assert office.state(action_id) == "completed"


def test_what_nobody_may_look_for_any_more_ends_in_plain_sight(office: Office) -> None:
    office.till.on_put = office.till.die
    action_id = office.approved()
    (message,) = office.idem.take()
    with pytest.raises(SystemExit):
        office.idem.deliver(message)
    office.idem.advance(601)  # past the window of the contract
    assert sweep(office.app) == {**NOTHING, "ended": 1}
    assert office.happened(action_id)[-1] == "ambiguous"
    assert len(office.letters()) == 1
    assert "ACTION_AMBIGUOUS" in office.shop.names()


def test_the_task_for_beat_sweeps_too(office: Office) -> None:
    office.approved()
    office.idem.take()
    office.idem.advance(121)
    delivered = office.idem.send(office.app.tasks["celery_idem.governed.sweep"])
    assert delivered.value == {**NOTHING, "enqueued": 1}


def test_while_the_broker_is_down_no_chain_is_replaced(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    action_id = office.approved()
    office.idem.take()
    office.idem.advance(121)
    before = office.store.get_action(action_id)["chain_id"]
    there = office.app.conf.broker_url
    office.app.conf.broker_url = "redis://127.0.0.1:1/0"
    try:
        assert sweep(office.app) == {**NOTHING, "unpublished": 1}
    finally:
        office.app.conf.broker_url = there
    assert "could not publish" in caplog.text
    assert office.store.get_action(action_id)["chain_id"] == before
    assert sweep(office.app)["enqueued"] == 1


def test_chains_count_how_often_they_were_swept() -> None:
    first = new_chain()
    assert [sweeps_of(chain) for chain in (None, "", "by-hand", "123456-9", first)] == [0, 0, 0, 0, 0]
    assert sweeps_of(new_chain(first)) == 1
    assert sweeps_of(new_chain(new_chain(first))) == 2
    assert sweeps_of(new_chain("by-hand")) == 1


# --- the worker's thread ---------------------------------------------------------------------------------------------


@pytest.fixture
def sweeper(office: Office) -> Any:
    """A sweeper that looks twenty times a second."""
    made = Sweeper(office.app, 0.05)
    made.start()
    yield made
    made.stop()


def test_a_worker_sweeps_by_itself(office: Office, sweeper: Sweeper) -> None:
    office.approved()
    office.idem.take()
    office.idem.advance(121)
    wait_until(office.idem.messages, 10, "the lost message is published")


def test_an_outage_is_told_once_and_survived(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="celery_idem")
    tries = []

    class Down(SQLActionStore):
        def recover_expired_leases(self, **_: Any) -> None:
            tries.append(1)
            raise StoreUnavailable("no answer")

    def down() -> SQLActionStore:
        return Office.open(office, Down)

    up, office.governance.open_store = office.governance.open_store, down  # type: ignore[method-assign]
    sweeper = Sweeper(office.app, 0.02)
    sweeper.start()
    wait_until(lambda: len(tries) >= 3, 10, "three sweeps failed")
    office.governance.open_store = up  # type: ignore[method-assign]
    wait_until(lambda: "looked after again" in caplog.text, 10, "it goes on")
    sweeper.stop()
    assert caplog.text.count("are not looked after now") == 1


def test_it_ends_at_once(office: Office) -> None:
    sweeper = Sweeper(office.app, 3600)
    sweeper.start()
    began = time.monotonic()
    sweeper.stop()
    assert time.monotonic() - began < 30, "not when its hour is over"
    gone = lambda: "celery_idem sweep" not in [thread.name for thread in threading.enumerate()]  # noqa: E731
    wait_until(gone, 30, "the thread is gone")


def test_the_step_begins_only_where_there_is_something_to_sweep(tmp_path: Path) -> None:
    for conf, begins in (
        ({}, True),
        ({"governed_sweep_interval": 0}, False),
    ):
        office = Office(tmp_path, **conf)
        parent = type("Parent", (), {"app": office.app, "steps": []})()
        step = recovery_module.SweepStep(parent)
        step.start(parent)
        assert (step._sweeper is not None) is begins
        step.stop(parent)
        assert step._sweeper is None
        office.close()


def test_no_child_is_forked_while_the_sweep_speaks_to_database_or_broker(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that inherits a lock which the sweep's thread held waits for it for ever: prefork replaces children at
    any moment."""
    office.approved()
    office.idem.take()
    office.idem.advance(121)
    somebodys = threading.Lock()  # as kombu's and libpq's are: nobody makes it new in a child
    parts = {"recover_expired_leases": office.store, "confirming_options": recovery_module, "_send": recovery_module}
    inside, forking, seen = threading.Event(), threading.Event(), []

    for name, owner in parts.items():
        target = type(owner) if owner is office.store else owner
        monkeypatch.setattr(target, name, holding(somebodys, inside, forking, getattr(target, name)))
    thread = threading.Thread(target=sweep, args=(office.app,))
    thread.start()
    while thread.is_alive():
        if inside.wait(0.01):
            inside.clear()
            forking.set()
            seen.append(forked_child_gets(somebodys))
    thread.join()
    assert seen == [True] * len(parts)


def holding(lock: threading.Lock, inside: threading.Event, forking: threading.Event, call: Any) -> Any:
    """The call, under the lock, and slow enough for a fork to begin in it."""

    def slow(*args: Any, **kwargs: Any) -> Any:
        with lock:
            inside.set()
            assert forking.wait(20)
            forking.clear()
            time.sleep(0.2)
            return call(*args, **kwargs)

    return slow


def forked_child_gets(lock: threading.Lock) -> bool:
    """Fork now; whether the child can take the lock."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if lock.acquire(timeout=20) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
