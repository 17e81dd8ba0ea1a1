"""The public API as users write it: never run, only checked by mypy in strict mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Celery

import celery_idem
from celery_idem import (
    CeleryIdemError,
    ClaimConflict,
    ConfigurationError,
    DeliveriesExhausted,
    Engine,
    FingerprintMismatch,
    Happened,
    IdempotentTask,
    KeyMissing,
    LeaseLost,
    NotHappened,
    OutcomeUnknown,
    ParkFailed,
    Policy,
    RecordCorrupt,
    ReplayedFailure,
    ReplayImpossible,
    ResultUnavailable,
    RunContext,
    Store,
    StoreError,
    StoreUnavailable,
    current,
    open_store,
)
from celery_idem.core.engine import new_token
from celery_idem.core.records import Claim, Decision, Delivery, Operation, Outcome, Record, RunResult, State, Status
from celery_idem.stores.sql.schema import metadata
from celery_idem.testing import Delivered, Idem, KillPoints, Message, Worker

app = Celery("shop", broker="redis://localhost/0")
app.conf.idempotency_store = "redis://localhost/2"
app.conf.update(idempotency_ttl=3600, idempotency_replay_failures=(ValueError,))


# --- tasks and policies -----------------------------------------------------------------------------------------------


def find_charge(order_id: int, amount: int) -> Happened | NotHappened:
    if order_id > 0:
        return Happened({"order": order_id, "paid": amount})
    return NotHappened()


def this_order(arguments: Mapping[str, Any]) -> str:
    return f"order:{arguments['order_id']}"


def tenant(request: Any) -> str:
    return str(request.tenant)


full = Policy(
    name="shop.charge",
    key=this_order,
    scope=tenant,
    fingerprint=["amount"],
    lease=30,
    ttl=3600.0,
    wait_timeout=0.5,
    on_conflict="fail",
    verify=find_charge,
    on_unknown="fail",
    on_lease_lost="continue",
    max_deliveries=3,
    storage_policy="fail_open",
    serializer="json",
    result_max_bytes=1000,
    replay_failures=(ValueError, KeyError),
    cacheable=lambda value: value is not None,
    on_replay=lambda value, record: (value, record.fence),
)
sources = [Policy(key="message"), Policy(key=["order_id"]), Policy(key=("order_id",)), Policy(key="order:{order_id}")]
merged: Policy = Policy(lease=5).over(full)

wrong_choice = Policy(on_conflict="wait")  # type: ignore[arg-type]
wrong_kind = Policy(replay_failures=(SystemExit,))  # type: ignore[arg-type]
wrong_name = Policy(leese=5)  # type: ignore[call-arg]


class BillingTask(IdempotentTask):
    abstract = True
    idempotency = Policy(on_unknown="fail")  # taken off the class when it is made


@app.task(base=BillingTask, bind=True, idempotency=full)
def charge(self: IdempotentTask, order_id: int, amount: int) -> dict[str, int]:
    run: RunContext = self.idempotency
    run.check()
    key: str = run.key
    fence: int = run.fence
    attempt: int = run.attempt
    told: bool = run.reclaimed or run.lost
    return {"key": len(key), "fence": fence, "attempt": attempt, "told": int(told), "paid": amount}


@app.task(base=IdempotentTask, key="order:{order_id}")
def ship(order_id: int) -> None:
    running: RunContext | None = current()
    if running is not None:
        running.check()


def publish(task: IdempotentTask) -> None:
    task.apply_async((7, 20), idempotency_key="order:7", countdown=5)
    task.delay(7, 20)


# --- errors ---------------------------------------------------------------------------------------------------------


def handled(error: BaseException) -> str:
    if isinstance(error, StoreUnavailable):
        landed: bool = error.may_have_landed
        return f"store {landed}"
    if isinstance(error, ReplayedFailure):
        name: str = error.exc_type
        return name
    if isinstance(error, (RecordCorrupt, StoreError)):
        return "store"
    if isinstance(error, CeleryIdemError):
        facts: dict[str, object] = error.facts
        return str(facts)
    return "lost" if isinstance(error, LeaseLost) else "other"


everything: list[type[CeleryIdemError]] = [
    ClaimConflict,
    ConfigurationError,
    DeliveriesExhausted,
    FingerprintMismatch,
    KeyMissing,
    OutcomeUnknown,
    ParkFailed,
    ReplayImpossible,
    ResultUnavailable,
]


# --- stores and the engine --------------------------------------------------------------------------------------------


def look(url: str) -> list[str]:
    store: Store = open_store(url, timeout=2.0, pool_size=2)
    store.create_schema()
    record: Record | None = store.get("0" * 64)
    if record is not None and record.state is State.COMPLETED:
        forgotten: bool = store.forget(record.key, record.fence)
        assert forgotten
    keys = [found.key for found in store.find(task="shop.charge", state=State.CLAIMED, older_than=600, limit=10)]
    purged: int = store.purge(100)
    warnings: list[str] = store.check()
    store.close()
    return [*keys, str(purged), *warnings]


def run_once(store: Store, key: str) -> Any:
    engine = Engine(store, Policy(ttl=60), dead_check=False, store_timeout=1.0)
    operation = Operation(key=key, delivery=Delivery("message-1", generation=0), token=new_token())

    def body(context: RunContext) -> int:
        return context.fence

    result: RunResult = engine.run(operation, body)
    decision: Decision | None = result.decision
    claim: Claim | None = None if decision is None else decision.claim
    outcome: Outcome | None = None if decision is None or decision.record is None else decision.record.outcome
    return result.value if result.status in {Status.EXECUTED, Status.REPLAYED} else (claim, outcome)


# --- tests of theirs --------------------------------------------------------------------------------------------------


def test_charge(idem: Idem, points: KillPoints) -> None:
    first: Delivered = idem.send(charge, 7, amount=50)
    with idem.killed(before="completion", task=charge), idem.during(charge.s(8, 50), before="body") as running:
        again: Delivered = idem.again(running)
    idem.advance(61, stalled=True)
    states: list[str] = [delivered.state for delivered in idem.run_all()]
    messages: list[Message] = idem.messages()
    record: Record | None = idem.record(first)
    runs: int = idem.runs("charge") + len(states) + len(messages) + len(again.events) + (record is not None)
    with Worker("shop:app", pool="threads", env={"RUNS": str(runs)}) as worker:
        worker.kill(before="publish", whole=True).wait(10)
        with points.hold(before="ack", task="charge") as held:
            held.wait()
    idem.killed(before="lunch")  # type: ignore[arg-type]


tables: list[str] = list(metadata.tables)
version: str = celery_idem.__version__
