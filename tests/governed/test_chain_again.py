"""The same messages again: redelivered, killed in the middle, of a chain that was replaced, in every mode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_idem.errors import ActionFailed, ActionTransitionError, ConfigurationError
from celery_idem.governed import chain as chain_module
from celery_idem.governed.chain import StepTask, approve, governed_chain, register
from celery_idem.testing import POINTS
from tests.governed.refunds import Office

pytest_plugins = ("tests.governed.refunds",)

STEPS = ("dispatch", "observe", "verify", "complete")


def happened_once(office: Office, action_id: str) -> None:
    assert office.state(action_id) == "completed"
    assert len(office.till.puts) == 1


# --- delivered again -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["enforce", "observe", "off"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_is_delivered_again_changes_nothing(tmp_path: Path, step: str, mode: str) -> None:
    office = Office(tmp_path, idempotency_mode=mode)
    action_id = office.approved()
    for name in STEPS:
        delivered = office.next(name)
        published = office.idem.take()
        if name == step:
            before = office.happened(action_id)
            again = office.idem.again(delivered)
            assert again.state == ("IGNORED" if mode == "enforce" else "SUCCESS")
            assert office.happened(action_id) == before
            copies = office.idem.take()
            assert [m.id for m in copies] == ([] if mode == "enforce" else [m.id for m in published])
        office.idem.queued += published
    happened_once(office, action_id)
    office.close()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_killed_at_any_point_ends_well(office: Office, step: str, point: Any) -> None:
    action_id = office.approved()
    with office.idem.killed(before=point, task=f"celery_idem.governed.{step}"):
        office.idem.run_all()
    office.idem.run_all()
    happened_once(office, action_id)


def test_a_process_that_ends_in_the_endpoint_is_found_by_looking(office: Office) -> None:
    office.till.on_put = office.till.die
    action_id = office.approved()
    (message,) = office.idem.take()
    with pytest.raises(SystemExit):
        office.idem.deliver(message)
    assert office.state(action_id) == "dispatched"
    office.idem.deliver(message.copy())  # the broker gives it again
    assert office.next("observe").state == "RETRY"  # the dead one's lease is still on it
    office.idem.run_all()
    happened_once(office, action_id)
    assert office.happened(action_id).count("observing") == 1


def test_two_copies_at_once_make_one_mutation(office: Office) -> None:
    action_id = office.approved()
    (message,) = office.idem.take()
    with office.idem.during(message, before="completion"):
        office.idem.deliver(message.copy())
    office.idem.run_all()
    happened_once(office, action_id)


# --- another chain ---------------------------------------------------------------------------------------------------


def replaced(office: Office, action_id: str) -> Any:
    """The messages of the action's old chain, which another one was named in place of."""
    messages = office.idem.take()
    assert office.store.replace_chain(action_id, office.store.get_action(action_id)["chain_id"], "another")
    return messages


def test_a_step_of_a_replaced_chain_never_waits(office: Office) -> None:
    action_id = office.approved()
    office.store.set_admission(False, "not now", actor="ops")
    (old,) = replaced(office, action_id)
    delivered = office.idem.deliver(old)
    assert (delivered.state, delivered.published) == ("IGNORED", [])
    office.store.set_admission(True, "now", actor="ops")
    governed_chain(action_id, "another", office.app).apply_async()
    office.idem.run_all()
    happened_once(office, action_id)


def test_a_step_of_a_replaced_chain_that_comes_first_is_as_good(office: Office) -> None:
    action_id = office.approved()
    (old,) = replaced(office, action_id)
    governed_chain(action_id, "another", office.app).apply_async()
    assert office.idem.deliver(old).state == "SUCCESS"
    office.idem.run_all()
    happened_once(office, action_id)


def test_the_waiting_is_done_by_one_chain_alone(office: Office) -> None:
    office.till.on_put, office.till.on_look = office.till.lose, office.till.look_away
    action_id = office.approved()
    office.next("dispatch")
    for _ in range(5):  # five chains, each with its own observe step on the broker
        office.store.replace_chain(action_id, office.store.get_action(action_id)["chain_id"], f"c-{_}")
        tasks = governed_chain(action_id, f"c-{_}", office.app).tasks
        tasks[1].apply_async()
    assert len(office.idem.messages()) == 6
    for message in office.idem.take():
        office.idem.deliver(message)
    assert len(office.idem.messages()) == 1
    done = office.idem.run_all()
    assert isinstance(done[-1].value, ActionFailed)
    assert len(office.till.puts) == 1


def test_a_late_message_of_a_replaced_chain_goes_on_where_its_step_is_over(office: Office) -> None:
    action_id = office.approved()
    (old,) = replaced(office, action_id)
    governed_chain(action_id, "another", office.app).apply_async()
    office.idem.run_all()
    delivered = office.idem.deliver(old)
    assert delivered.state == "SUCCESS"
    assert [m.task for m in delivered.published] == ["celery_idem.governed.observe"]
    office.idem.run_all()
    happened_once(office, action_id)


# --- eager, and how an app gets its steps ----------------------------------------------------------------------------


def test_an_eager_app_runs_the_whole_life_in_approve(office: Office) -> None:
    office.app.conf.task_always_eager = True
    action_id = office.approved()
    happened_once(office, action_id)


def test_an_eager_step_that_has_to_wait_says_so(office: Office) -> None:
    office.app.conf.task_always_eager = True
    office.store.set_admission(False, "not now", actor="ops")
    action_id = office.proposed()
    with pytest.raises(ActionTransitionError, match=r"has to wait \(admission closed: not now\): let a worker run"):
        approve(action_id, principal="ann", app=office.app)
    assert (office.state(action_id), office.till.puts) == ("gated", [])


def test_only_an_app_with_an_action_store_has_the_steps(tmp_path: Path) -> None:
    plain = Celery("plain", set_as_current=False)
    assert not [name for name in plain.tasks if "governed" in name]
    governed = Celery("governed", set_as_current=False)
    governed.conf.governed_store = f"sqlite:///{tmp_path}/a.db"
    steps = [name for name in governed.tasks if "governed" in name]
    assert sorted(steps) == [f"celery_idem.governed.{name}" for name in sorted((*STEPS, "sweep"))]
    late = Celery("late", set_as_current=False)
    late.finalize()
    late.conf.governed_store = f"sqlite:///{tmp_path}/a.db"
    governed_chain("a", "c", late)
    register(late)
    assert isinstance(late.tasks["celery_idem.governed.dispatch"], StepTask)
    assert late.tasks["celery_idem.governed.dispatch"].app is late


def test_a_worker_gets_the_steps_from_one_line_of_settings(tmp_path: Path) -> None:
    (tmp_path / "house.py").write_text(
        "from celery import Celery\n"
        "app = Celery('house', include=['celery_idem.governed.chain'], broker='memory://')\n"
        f"app.conf.governed_store = 'sqlite:///{tmp_path}/a.db'\n"
        "app.finalize()\n"
        "worker = app.Worker(pool='solo')\n"
        "print(*sorted(name for name in app.tasks if 'governed' in name))\n"
        "print(*[step.__name__ for step in app.steps['worker']])\n"
    )
    run = subprocess.run([sys.executable, "house.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    tasks, steps = run.stdout.splitlines()[-2:]
    assert tasks.split() == [f"celery_idem.governed.{name}" for name in sorted((*STEPS, "sweep"))]
    assert {"CheckStore", "SweepStep"} <= set(steps.split())


def test_a_worker_whose_store_is_misspelt_is_told(tmp_path: Path) -> None:
    app = Celery("house", broker="memory://", set_as_current=False)
    app.conf.governed_stor = f"sqlite:///{tmp_path}/a.db"
    app.finalize()
    assert not any(name.startswith("celery_idem.governed") for name in app.tasks)
    (step,) = (step for step in app.steps["worker"] if step.__name__ == "SweepStep")
    with pytest.raises(ConfigurationError, match="governed_stor is not a setting: did you mean governed_store"):
        step(SimpleNamespace(app=app, steps=[])).start(SimpleNamespace(app=app))


def test_a_steps_claim_is_a_mutex_that_remembers_nothing(office: Office) -> None:
    action_id = office.approved()
    office.idem.run_all()
    policy = office.app.tasks["celery_idem.governed.dispatch"].idempotency_policy
    assert (policy.ttl, policy.replay_failures, policy.on_unknown, policy.key) == (0, (), "run", "{action_id}")
    governed_chain(action_id, "any", office.app).tasks[0].apply_async()
    assert office.next("dispatch").value == {"action_id": action_id, "state": "completed"}
    assert chain_module.STEPS == STEPS
