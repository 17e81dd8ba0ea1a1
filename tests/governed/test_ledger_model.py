"""Whatever happens to actions in whatever order: the ledger answers as a small model does, and holds what it holds."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from celery_idem.errors import (
    ActionIdempotencyConflict,
    ActionStoreError,
    ActionTransitionError,
    AdmissionClosed,
    AlreadyDecided,
    GateRefused,
)
from celery_idem.governed import (
    LEASABLE_STATES,
    TERMINAL_STATES,
    SQLActionStore,
    message_approval,
)
from celery_idem.testing import ManualClock
from tests.governed.ledgers import (
    VALID,
    Ledger,
    accept,
    authorize,
    execution_of,
    look,
    on_each_database,
    unresolved,
    verify,
)
from tests.governed.model import Model, Refused
from tests.support.clock import START

pytest_plugins = ("tests.governed.ledgers",)

OWNERS = st.sampled_from(["ann", "bob"])
SECONDS = st.sampled_from([10.0, 60.0])
DELAYS = st.sampled_from([0.0, 45.0, 5000.0])
VERBS = ["dispatch", "look", "unresolved", "defer", "fail", "accept", "verify", "complete"]
WHAT = ["work"] * 12 + ["err"] * 5 + ["take"] * 3 + ["decide"] * 2 + ["wait"] * 2
"""What happens, as often as it should in comparison."""
COLUMNS = {
    "state": "state",
    "attempt_count": "attempts",
    "lease_owner": "owner",
    "lease_expires_at": "until",
    "next_attempt_at": "due",
    "updated_at": "updated",
    "created_at": "created",
}
"""Columns of the ledger, and what the model calls them."""
Draw = Callable[[st.SearchStrategy[Any]], Any]
ENDS = {
    "accept": ("dispatched", "accepted"),
    "verify": ("accepted", "verified"),
    "complete": ("verified", "completed"),
}


class Lives(RuleBasedStateMachine):
    """Several owners at work on up to three actions, through two handles to one ledger."""

    ledger: ClassVar[Ledger]
    clock: ClassVar[ManualClock]
    stores: ClassVar[list[SQLActionStore]]

    @initialize(actions=st.integers(1, 2))
    def begin(self, actions: int) -> None:
        self.clock.set(START)
        self.source = uuid.uuid4().hex
        self.models: dict[str, Model] = {}
        self.calls = 0
        self.switch(is_open=True)
        for _ in range(actions):
            self.propose()

    # -- how it is compared -------------------------------------------------------------------------------------------

    @property
    def store(self) -> SQLActionStore:
        """One handle or the other."""
        self.calls += 1
        return self.stores[self.calls % 2]

    def both(self, model: Callable[[], Any], ledger: Callable[[SQLActionStore], Any]) -> Any:
        """The same answer from both, or the same refusal; what the ledger answered."""
        expected: Any = None
        found: Any = None
        wanted: Refused | None = None
        try:
            expected = model()
        except Refused as said:
            wanted = said
        refusal: ActionStoreError | None = None
        try:
            found = ledger(self.store)
        except ActionStoreError as error:
            refusal = error
        told = None if refusal is None else (type(refusal).__name__, getattr(refusal, "code", ""))
        assert told == (None if wanted is None else wanted.args), refusal
        assert expected is None or expected == (found and found["action_id"])
        query = f"SELECT action_id, {', '.join(COLUMNS)} FROM celery_idem_action WHERE source = ?"
        stored = {row[0]: row[1:] for row in self.ledger.run(query, self.source)}
        assert stored.keys() == self.models.keys()
        for action_id, each in self.models.items():
            wanted_row = [getattr(each, name) for name in COLUMNS.values()]
            assert list(stored[action_id]) == [pytest.approx(value) for value in wanted_row]
        return found

    def pick(self, data: st.DataObject) -> Model:
        return data.draw(st.sampled_from(sorted(self.models.values(), key=lambda model: model.created)))

    def teardown(self) -> None:
        if not getattr(self, "models", None):
            return
        quiet = {found["action_id"] for found in self.store.stranded(60, limit=10_000)}
        stranded = {model.action_id for model in self.models.values() if self.is_stranded(model, 60)}
        assert quiet & self.models.keys() == stranded
        buried = {letter["action_id"] for letter in self.store.list_dead_letters(limit=10_000)}
        found = self.store.find(source=self.source)
        ordered = sorted(self.models.values(), key=lambda model: (model.created, model.action_id))
        assert [(action["action_id"], action["state"]) for action in found] == [
            (model.action_id, model.state) for model in ordered
        ]
        for action_id, model in self.models.items():
            assert [event["event_type"] for event in self.store.list_events(action_id)] == model.events
            receipts = self.store.list_receipts(action_id)
            kinds = [receipt["kind"] for receipt in receipts]
            assert kinds.count("gate") == len(model.gates)
            assert kinds.count("dispatch_recovery") == model.attempts == model.events.count("dispatched") <= 1
            assert kinds.count("dispatch_observation") == model.looks == model.events.count("observing")
            assert (action_id in buried) == bool({"failed", "ambiguous"} & set(model.events))

    def is_stranded(self, model: Model, grace: float) -> bool:
        """Whether it has lost its chain; one that no chain can do anything for ends here."""
        now = self.clock()
        if model.state not in {*LEASABLE_STATES, "dispatched"} or not model.is_free(now):
            return False
        if max(model.updated, model.due) > now - grace:
            return False
        if model.state == "dispatched" and model.is_spent(now):
            model.become("ambiguous", now, "failed")
        elif model.state == "gated" and any(gate["expires_at_epoch"] <= now for gate in model.gates.values()):
            model.become("failed", now, "failed")
        return model.state != "failed"

    # -- what may happen ----------------------------------------------------------------------------------------------

    @rule(data=st.data(), what=st.sampled_from(WHAT))
    def happen(self, data: st.DataObject, what: str) -> None:
        """One rule for all: of many, hypothesis would leave some out of each history, and few would get far."""
        getattr(self, what)(self.pick(data), data.draw)

    def decide(self, model: Model, draw: Draw) -> None:
        """Somebody decides on an action, or on all of them."""
        what = draw(st.sampled_from(["approve", "gate", "reject", "propose", "switch"]))
        lifetime = draw(st.sampled_from([50.0, 7200.0]))
        if what == "approve":
            self.approve(model, lifetime)
        elif what == "gate":
            self.gate(model, lifetime, draw(st.sampled_from(["owner-gate", "second"])))
        elif what == "reject":
            self.reject(model)
        elif what == "propose" and len(self.models) < 4:
            self.propose()
        elif what == "switch":
            self.switch(is_open=draw(st.booleans()))

    def take(self, model: Model, draw: Draw) -> None:
        """Somebody asks for work, or reaps."""
        what = draw(st.sampled_from(["lease", "look", "recover"]))
        if what == "recover":
            self.recover()
        else:
            (self.lease if what == "lease" else self.lease_a_look)(draw(OWNERS), draw(SECONDS))

    def work(self, model: Model, draw: Draw) -> None:
        """A worker does with an action what is to be done next."""
        if model.state == "proposed":
            self.approve(model, draw(st.sampled_from([50.0, 7200.0, 7200.0])))
        elif model.owner is None and model.state not in TERMINAL_STATES:
            (self.lease_a_look if model.state == "dispatched" else self.lease)("ann", 60.0)
        elif model.state == "gated":
            if not self.is_open:
                self.switch(is_open=draw(st.booleans()))
            judge = draw(st.sampled_from(["good", "good", "blind", "raises"]))
            self.dispatch(model, model.owner, judge, 600.0, draw(st.integers(1, 3)))
        elif model.state in {"accepted", "verified"}:
            self.go_on(model, model.owner, "verify" if model.state == "accepted" else "complete", draw(st.booleans()))
        elif model.state == "dispatched":
            what = draw(st.sampled_from(["accept", "look", "look", "unresolved", "crash"]))
            if what == "accept":
                self.go_on(model, model.owner, "accept", draw(st.booleans()))
            elif what == "look":
                self.look(model, model.owner)
            elif what == "unresolved":
                self.unresolved(model, model.owner, draw(DELAYS), model.looks)
            else:
                self.clock.advance(61.0)
                self.recover()

    def err(self, model: Model, draw: Draw) -> None:
        """Anybody calls any verb at any moment, mostly the one who holds the lease."""
        what = draw(st.sampled_from(VERBS))
        owner = draw(st.sampled_from(["ann", "bob", *[model.owner or "ann"] * 3]))
        if what == "dispatch":
            judge = draw(st.sampled_from(sorted(JUDGES)))
            self.dispatch(model, owner, judge, draw(st.sampled_from([40.0, 600.0])), 1)
        elif what == "look":
            self.look(model, owner)
        elif what == "unresolved":
            self.unresolved(model, owner, draw(DELAYS), model.looks - draw(st.integers(0, 1)))
        elif what == "defer":
            self.defer(model, owner, draw(DELAYS))
        elif what == "fail":
            self.fail(model, owner, draw(st.booleans()))
        else:
            self.go_on(model, owner, what, draw(st.booleans()))

    def wait(self, model: Model, draw: Draw) -> None:
        """Time passes; sometimes somebody sets the clock back."""
        self.clock.advance(draw(st.sampled_from([0.5, 10.0, 30.0, 60.0, 61.0, 700.0, -45.0])))

    # -- each verb, in the model and in the ledger --------------------------------------------------------------------

    def propose(self) -> None:
        number, now = len(self.models), self.clock()
        action_id = f"{self.source}-{number}"
        self.models[action_id] = Model(action_id, now, now, now)
        given = {"source_ref": None, "action_id": action_id}
        self.models[action_id].as_proposed = self.both(
            lambda: action_id, lambda s: s.propose(action_id, self.source, "refund", {"n": number}, **given)
        )

    def approval(self, model: Model, lifetime: float) -> dict[str, Any]:
        return message_approval(
            model.as_proposed,
            principal="ann@example.org",
            channel="web",
            thread_id="t",
            event_id=uuid.uuid4().hex,
            decided_at=self.clock(),
            lifetime=lifetime,
        )

    def switch(self, *, is_open: bool) -> None:
        self.is_open = is_open
        assert self.store.set_admission(is_open, "as drawn", actor="ann")["open"] is is_open

    def gate(self, model: Model, lifetime: float, key: str) -> None:
        evidence = self.approval(model, lifetime)

        def expected() -> None:
            now = model.now(self.clock())
            if key in model.gates:
                raise Refused(ActionIdempotencyConflict)
            if model.state == "gated":
                model.become("gate_added", now)
            else:
                model.is_in("proposed")
                model.become("gated", now, "gated", due=now)
            model.gates[key] = evidence

        self.both(expected, lambda s: s.gate(model.action_id, evidence, receipt_key=key))

    def approve(self, model: Model, lifetime: float) -> None:
        evidence = self.approval(model, lifetime)

        def expected() -> None:
            now = model.now(self.clock())
            if model.gates or "rejected" in model.events:
                raise Refused(AlreadyDecided)
            model.is_in("proposed")
            model.become("gated", now, "gated", due=now)
            model.become("enqueued", now)
            model.gates["owner-gate"] = evidence

        self.both(expected, lambda s: s.approve(model.action_id, evidence, chain_id="chain"))

    def reject(self, model: Model) -> None:
        def expected() -> None:
            if "rejected" in model.events:
                raise Refused(AlreadyDecided)
            if model.state not in {"proposed", "gated"}:
                raise Refused(ActionTransitionError)
            model.become("rejected", model.now(self.clock()), "failed")

        self.both(expected, lambda s: s.reject(model.action_id, "no", actor="ann"))

    def ready(self, states: frozenset[str]) -> list[Model]:
        free = [model for model in self.models.values() if model.state in states and model.is_free(self.clock())]
        return sorted(free, key=lambda model: (model.due, model.created, model.action_id))

    def lease(self, owner: str, seconds: float) -> None:
        def expected() -> str | None:
            for model in self.ready(LEASABLE_STATES)[:1]:
                now = model.now(self.clock())
                model.become("leased", now, owner=owner, until=now + seconds)
                return model.action_id
            return None

        given = {"lease_seconds": seconds, "states": sorted(LEASABLE_STATES), "source": self.source}
        self.both(expected, lambda s: s.lease_next(owner, **given))

    def lease_a_look(self, owner: str, seconds: float) -> None:
        def expected() -> str | None:
            for model in self.ready(frozenset({"dispatched"})):
                now = model.now(self.clock())
                if not model.is_spent(now):
                    model.become("leased", now, owner=owner, until=now + seconds)
                    return model.action_id
                model.become("ambiguous", now, "failed")
            return None

        given = {"lease_seconds": seconds, "source_prefix": self.source[:30]}
        self.both(expected, lambda s: s.lease_dispatched_observation(owner, **given))

    def recover(self) -> None:
        def expected() -> None:
            for model in self.models.values():
                now = model.now(self.clock())
                if model.until is None or model.until > self.clock():
                    continue
                if model.state == "dispatched" and model.is_spent(now):
                    model.become("ambiguous", now, "failed")
                else:
                    model.become("lease_expired", now, owner=None, until=None)

        self.both(expected, lambda s: s.recover_expired_leases(source=self.source))

    def defer(self, model: Model, owner: str, delay: float) -> None:
        def expected() -> None:
            now = model.now(self.clock())
            model.held_by(owner, now)
            if model.state not in LEASABLE_STATES:
                raise Refused(ActionTransitionError)
            model.become("deferred", now, owner=None, until=None, due=now + delay)

        self.both(expected, lambda s: s.defer_leased(model.action_id, owner, "later", delay))

    def dispatch(self, model: Model, owner: str, judge: str, window: float, budget: int) -> None:
        key, evidence = next(iter(model.gates.items()), ("owner-gate", {"approval_id": "none", "decision_id": "none"}))

        def expected() -> None:
            now = model.now(self.clock())
            model.held_by(owner, now)
            model.is_in("gated")
            if model.due > now:
                raise Refused(ActionTransitionError)
            if not self.is_open:
                raise Refused(AdmissionClosed)
            if len(model.gates) != 1:
                raise Refused(GateRefused, "gate_count")
            if now >= evidence["expires_at_epoch"]:
                raise Refused(GateRefused, "expired")
            if judge in {"raises", "nothing"}:
                raise Refused(GateRefused, "validator")
            contract = {"deadline": now + window, "budget": budget}
            model.become("dispatched", now, "dispatched", attempts=model.attempts + 1, **contract)

        given = {
            "gate_receipt_key": key,
            "expected_source": self.source,
            "expected_source_ref": None,
            "expected_action_type": "refund",
            "expected_payload": model.as_proposed["payload"],
            "expected_approval_id": evidence["approval_id"],
            "expected_decision_id": evidence["decision_id"],
            "expected_execution_digest": execution_of(model.action_id),
            "observation_window_seconds": window,
            "max_observations": budget,
            "gate_validator": JUDGES[judge],
        }
        self.both(expected, lambda s: s.begin_owner_authorized_dispatch(model.action_id, owner, **given))

    def look(self, model: Model, owner: str) -> None:
        def expected() -> None:
            now = model.now(self.clock())
            model.held_by(owner, now)
            model.is_in("dispatched")
            if model.is_spent(now):
                model.become("ambiguous", now, "failed")
            else:
                model.become("observing", now, looks=model.looks + 1)

        self.both(expected, lambda s: look(s, model.action_id, owner)[0])

    def unresolved(self, model: Model, owner: str, delay: float, number: int) -> None:
        key = f"dispatch-observation:{execution_of(model.action_id)}:{number:03d}"

        def expected() -> None:
            now = model.now(self.clock())
            model.held_by(owner, now)
            model.is_in("dispatched")
            if number != model.looks or not number:
                raise Refused(ActionTransitionError)
            if model.is_spent(now):
                model.become("ambiguous", now, "failed")
            else:
                due = min(now + delay, model.deadline)
                model.become("unresolved", now, owner=None, until=None, due=due)

        self.both(expected, lambda s: unresolved(s, model.action_id, key, delay, owner))

    def go_on(self, model: Model, owner: str, step: str, keep: bool) -> None:
        start, end = ENDS[step]

        def expected() -> None:
            now = model.now(self.clock())
            model.held_by(owner, now)
            model.is_in(start)
            values: dict[str, Any] = {} if step == "complete" else {"due": now}
            model.become(end, now, end, **values, **({} if keep else {"owner": None, "until": None}))

        calls: dict[str, Callable[[SQLActionStore], Any]] = {
            "accept": lambda s: accept(s, model.action_id, owner, keep_lease=keep)[0],
            "verify": lambda s: verify(s, model.action_id, owner, keep_lease=keep)[0],
            "complete": lambda s: s.complete(model.action_id, owner, {"ok": True}),
        }
        self.both(expected, calls[step])

    def fail(self, model: Model, owner: str, retryable: bool) -> None:
        def expected() -> None:
            now = model.now(self.clock())
            model.held_by(owner, now)
            model.become("failed", now, "failed")

        self.both(expected, lambda s: s.fail_attempt(model.action_id, owner, "no luck", retryable))


def raises(*_: Any) -> Any:
    raise LookupError("no such owner")


JUDGES: dict[str, Any] = {"good": VALID, "blind": authorize, "raises": raises, "nothing": lambda *_: None}
HISTORIES = {"sqlite": 60, "psycopg2": 25}


@on_each_database
def test_every_history_goes_as_in_the_model(ledger: Ledger, clock: ManualClock) -> None:
    class Here(Lives):
        pass

    Here.ledger, Here.clock, Here.stores = ledger, clock, [ledger.open(clock), ledger.open(clock)]
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=HISTORIES[ledger.name],
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # a broken rule is told at once; making its history shorter takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
