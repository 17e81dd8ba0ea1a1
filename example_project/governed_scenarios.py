"""What the demo does to refunds that need an owner's approval: each scenario with what happens and what is promised."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from celery_idem.governed import (
    AlreadyDecided,
    GateRefused,
    SQLActionStore,
    approve,
    governed_chain,
    message_approval,
)
from example_project.app import app
from example_project.refund_ledger import Fault, RefundLedger
from example_project.refunds import allow_refund, ask_for_refund

LIFETIME = 1.5
"""Seconds an approval holds that is to expire."""


@dataclass(frozen=True)
class Played:
    """The action to look at, and what those were told who tried something."""

    action_id: str
    told: str = ""


@dataclass(frozen=True)
class Seen:
    """What an action came to."""

    told: str
    puts: int
    looks: int
    refunds: int
    verb: str
    """What it was answered: execute, or observe, which is looking; empty where it never was."""
    dispatcher: str
    """The try that sent it; ``finder``, the one that got an answer."""
    finder: str
    state: str
    dead_letter: str

    @property
    def found_by_another(self) -> bool:
        """Whether it was looked for, and not by the process that had sent it."""
        return self.verb == "observe" and self.dispatcher != self.finder

    @property
    def end(self) -> str:
        """The state, and of a dead letter the word that says why."""
        return f"{self.state}: {self.dead_letter.partition(':')[0]}" if self.dead_letter else self.state


@dataclass
class Stage:
    """What a scenario has to play with."""

    store: SQLActionStore
    ledger: RefundLedger
    wait: Callable[[Callable[[], object], str], None]
    """Until something is so."""
    lose_worker: Callable[[], None]
    """SIGKILL to the whole worker, and a new one."""

    def propose(self, amount: int = 100, fault: Fault | None = None) -> str:
        """Propose the refund of a new order; what goes wrong with it at the provider."""
        action_id = str(ask_for_refund(f"order-{uuid4().hex[:8]}", amount)["action_id"])
        if fault is not None:
            self.ledger.plan(action_id, fault)
        return action_id

    def sent(self, action_id: str) -> int:
        """Wait until the PUT has arrived and its answer is held back; the process that waits for the answer."""
        self.wait(lambda: self.ledger.refunds(action_id), "the refund service has the PUT")
        return int(self.ledger.requests(action_id, "PUT")[0].worker)

    def happened(self, action_id: str, event_type: str) -> bool:
        """Whether this is in the action's history."""
        return any(event["event_type"] == event_type for event in self.store.list_events(action_id))

    def seen(self, played: Played) -> Seen:
        """What became of it, by the service's ledger and by the action's history."""
        action_id = played.action_id
        actors = {event["event_type"]: event["actor"] for event in self.store.list_events(action_id)}
        answers = {receipt["kind"]: receipt["evidence"] for receipt in self.store.list_receipts(action_id)}
        letters = {letter["action_id"]: letter["reason"] for letter in self.store.list_dead_letters()}
        return Seen(
            told=played.told,
            puts=len(self.ledger.requests(action_id, "PUT")),
            looks=len(self.ledger.requests(action_id, "GET")),
            refunds=len(self.ledger.refunds(action_id)),
            verb=answers.get("acceptance", {}).get("verb", ""),
            dispatcher=actors.get("dispatched", ""),
            finder=actors.get("accepted", ""),
            state=self.store.get_action(action_id)["state"],
            dead_letter=letters.get(action_id, ""),
        )


@dataclass(frozen=True)
class Scenario:
    """One row of the table."""

    title: str
    done: str
    play: Callable[[Stage], Played]
    puts: int
    """That reach the refund service."""
    refunds: int
    """In its ledger."""
    end: str
    promised: str
    kept: Callable[[Seen], object] = lambda _: True
    """Whether the rest of the promise holds too."""

    def promise_kept(self, seen: Seen) -> bool:
        """Whether everything is as the row says."""
        numbers = (seen.puts, seen.refunds, seen.end) == (self.puts, self.refunds, self.end)
        return numbers and bool(self.kept(seen))


# --- what happens -----------------------------------------------------------------------------------------------------


def _approved(stage: Stage, fault: Fault | None = None) -> Played:
    action_id = stage.propose(fault=fault)
    allow_refund(action_id, "ann")
    return Played(action_id)


def _process_killed(stage: Stage) -> Played:
    played = _approved(stage, "hold")
    os.kill(stage.sent(played.action_id), signal.SIGKILL)
    return played


def _worker_killed(stage: Stage) -> Played:
    played = _approved(stage, "hold")
    stage.sent(played.action_id)
    stage.lose_worker()
    return played


def _other_payload(stage: Stage) -> Played:
    small, large = (stage.store.get_action(stage.propose(amount)) for amount in (20, 2000))
    now = stage.store.now()
    evidence = message_approval(small, principal="ann", channel="demo", thread_id="1", event_id="1", decided_at=now)
    told = _refused(lambda: approve(large["action_id"], evidence, app=app))
    # The same by somebody who can write to the database and to the broker.
    chain_id = str(uuid4())
    forged = {**evidence, "action_id": large["action_id"]}
    stage.store.approve(large["action_id"], forged, chain_id=chain_id)
    governed_chain(large["action_id"], chain_id, app=app).apply_async()
    return Played(large["action_id"], told)


def _expired(stage: Stage) -> Played:
    action_id = stage.propose()
    stage.store.set_admission(False, "until an approval has expired", actor="demo")
    allow_refund(action_id, "ann", lifetime=LIFETIME)
    over = stage.store.now() + LIFETIME
    stage.wait(lambda: stage.store.now() > over, "the approval has expired")
    stage.store.set_admission(True, "it has", actor="demo")
    return Played(action_id)


def _two_owners(stage: Stage) -> Played:
    action_id = stage.propose()
    with ThreadPoolExecutor(2) as at_once:
        told = list(at_once.map(lambda who: _refused(lambda: allow_refund(action_id, who)), ("ann", "bob")))
    return Played(action_id, " and ".join(filter(None, told)))


def _closed(stage: Stage) -> Played:
    action_id = stage.propose()
    stage.store.set_admission(False, "the provider has maintenance", actor="demo")
    allow_refund(action_id, "ann")
    stage.wait(lambda: stage.happened(action_id, "deferred"), "the chain has met the closed switch")
    action = stage.store.get_action(action_id)
    untouched = action["state"] == "gated" and action["attempt_count"] == 0
    stage.store.set_admission(True, "it is over", actor="demo")
    return Played(action_id, "nothing consumed" if untouched else f"{action['state']}, {action['attempt_count']}")


def _refused(attempt: Callable[[], Any]) -> str:
    """What an approver is told who comes too late, or with something that is no approval of this."""
    try:
        attempt()
    except (AlreadyDecided, GateRefused) as error:
        return str(error)
    return ""


# --- the rows ---------------------------------------------------------------------------------------------------------

SCENARIOS = (
    Scenario(
        title="an owner approves",
        done="proposed, approved",
        play=_approved,
        puts=1,
        refunds=1,
        end="completed",
        promised="one refund",
        kept=lambda seen: seen.verb == "execute",
    ),
    Scenario(
        title="process killed between PUT and answer",
        done="SIGKILL to the pool process that waits for the answer",
        play=_process_killed,
        puts=1,
        refunds=1,
        end="completed",
        promised="one refund, found by looking",
        kept=lambda seen: seen.found_by_another,
    ),
    Scenario(
        title="worker killed between PUT and answer",
        done="SIGKILL to the whole worker, which had the message",
        play=_worker_killed,
        puts=1,
        refunds=1,
        end="completed",
        promised="one refund, found by looking; the sweep makes up for a lost message",
        kept=lambda seen: seen.found_by_another,
    ),
    Scenario(
        title="an approval of another payload",
        done="20 approved, used for 2000: by approve(), then in the database",
        play=_other_payload,
        puts=0,
        refunds=0,
        end="failed: gate refused, action_digest",
        promised="refused both times, nothing sent",
        kept=lambda seen: "gate refused" in seen.told,
    ),
    Scenario(
        title="an approval that has expired",
        done="approved, held up by closed admission until it expired",
        play=_expired,
        puts=0,
        refunds=0,
        end="failed: gate refused, expired",
        promised="refused, nothing sent, a dead letter",
    ),
    Scenario(
        title="two owners approve at once",
        done="ann and bob click together",
        play=_two_owners,
        puts=1,
        refunds=1,
        end="completed",
        promised="one refund; the second reads who was first",
        kept=lambda seen: seen.told.count("already approved by") == 1,
    ),
    Scenario(
        title="admission is closed",
        done="approved while closed, then opened",
        play=_closed,
        puts=1,
        refunds=1,
        end="completed",
        promised="nothing consumed while closed; one refund then",
        kept=lambda seen: seen.told == "nothing consumed",
    ),
    Scenario(
        title="the provider says no",
        done="it answers that the order was never paid",
        play=lambda stage: _approved(stage, "refuse"),
        puts=1,
        refunds=0,
        end="failed: the endpoint says rejected",
        promised="no refund, and a dead letter says why",
    ),
    Scenario(
        title="an answer to something else",
        done="the PUT is answered for another execution",
        play=lambda stage: _approved(stage, "garbage"),
        puts=1,
        refunds=1,
        end="completed",
        promised="not believed; one refund, found by looking",
        kept=lambda seen: seen.verb == "observe",
    ),
    Scenario(
        title="an answer that never comes",
        done="the provider refunds, and is silent from then on",
        play=lambda stage: _approved(stage, "silent"),
        puts=1,
        refunds=1,
        end="failed: ambiguous",
        promised="never a second PUT; a dead letter says nobody knows",
        kept=lambda seen: seen.looks > 1,
    ),
)
