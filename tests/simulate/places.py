"""What the workers of a run talk to: broker, result backend and store, each call of which has a point before and after.

They are in memory and keep what the real ones keep: a message until it is acked, a final state once it is SUCCESS, the
parts of a chord by their place. Of the store only the wrapper is here; behind it are the library's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from celery import states
from celery.backends.base import BaseBackend
from celery.canvas import maybe_signature
from kombu.exceptions import OperationalError
from kombu.transport import TRANSPORT_ALIASES, memory, virtual

from celery_idem.core.heartbeat import RETRY_AFTER, Heartbeat
from celery_idem.core.records import Claim, Decision, Ended, Operation, Outcome, Record, Release, Renewal, Successor
from celery_idem.errors import StoreError, StoreUnavailable
from celery_idem.publish import moment
from tests.simulate.world import World

SCHEME = "simulated"
TRANSPORT_ALIASES[SCHEME] = "tests.simulate.places:Transport"
BACKEND = "tests.simulate.places:Backend"
HERE: Any = SimpleNamespace(world=None)
"""Which run this process is in."""


def world() -> World:
    """The run."""
    running: World = HERE.world
    return running


# --- broker -----------------------------------------------------------------------------------------------------------


class Message:
    """A message on the broker."""

    def __init__(self, payload: Mapping[str, Any], queue: str) -> None:
        self.payload, self.queue = payload, queue
        headers = payload["headers"]
        self.id, self.task = str(headers["id"]), str(headers["task"])
        self.retries = int(headers.get("retries") or 0)
        self.park = headers.get("idempotency_park")
        self.unacked = True
        eta = headers.get("eta")
        self.due = moment(eta).timestamp() if eta else 0.0
        self.redelivered = False
        self.hit = False
        """A fault fell on the worker that has it."""
        index = headers.get("group_index")
        self.slot = self.task if index is None else f"{self.task}#{index}"

    @property
    def name(self) -> str:
        """The message, its attempt and whether it is a parked or a restored copy."""
        marks = ("p" if self.park else "") + ("r" if self.redelivered else "")
        return f"{self.task}[{self.id[:8]}]{self.retries}{marks}"

    def copy(self, now: float) -> Message:
        """The message as the broker gives it once more."""
        again = copy.copy(self)
        again.payload = copy.deepcopy(dict(self.payload))
        again.payload["properties"]["delivery_info"]["redelivered"] = True
        again.redelivered, again.unacked, again.hit = True, True, False
        again.due = max(self.due, now)
        return again


class Channel(memory.Channel):
    """Puts what is published on the run's one broker."""

    queues: dict[str, Any] = {}  # noqa: RUF012  as kombu has it

    def _has_queue(self, queue: str, **_: Any) -> bool:
        return True

    def _new_queue(self, queue: str, **_: Any) -> None: ...

    def _put(self, queue: str, message: Any, **_: Any) -> None:
        here, fresh = world(), Message(copy.deepcopy(message), queue)
        worker = here.here()
        delivery = None if worker is None else worker.delivery
        own = delivery is not None and (delivery.id, delivery.task) == (fresh.id, fresh.task)
        # A chord's body is sent by the backend, which makes an error of its own of one that is not.
        faults = ("refused", "unanswered") if delivery is not None and not here.sends_a_body else ()
        suffered = here.point(f"publish {fresh.name}", *faults)
        fresh.due = max(fresh.due, here.clock.now)
        if suffered is not None:
            here.ledger.refused(delivery, fresh, own=own)
        if suffered == "refused":
            raise OperationalError("simulated: the broker refuses")
        here.tell(f"publishes {fresh.name} in {fresh.due - here.clock.now:g} s")
        here.queue.append(fresh)
        here.ledger.publishes(worker, fresh)
        if suffered == "unanswered":
            raise OperationalError("simulated: the broker does not answer")
        here.point(f"published {fresh.name}")


class Transport(memory.Transport):
    """Kombu's memory transport with that channel; one state for each virtual host."""

    Channel = Channel

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self.state = virtual.BrokerState()


# --- result backend ---------------------------------------------------------------------------------------------------


class Backend(BaseBackend):
    """Results as Redis has them: SUCCESS stays, a chord's parts are kept by place, its body is sent by the last."""

    persistent = True

    def _store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **_: Any
    ) -> Any:
        here = world()
        here.point(f"store {state} of {task_id[:8]}")
        if here.results.get(task_id, ("",))[0] != states.SUCCESS:
            here.tell(f"stores {state} of {task_id[:8]}: {result!r}"[:120])
            here.results[task_id] = (state, result)
        worker = here.here()
        if worker is not None:
            here.ledger.answers(worker, task_id, state, result)
        here.point(f"stored {state} of {task_id[:8]}")
        return result

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        state, result = world().results.get(task_id, (states.PENDING, None))
        return {"status": state, "result": result, "traceback": None, "children": []}

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """How many parts there will be."""
        world().sizes[group_id] = chord_size

    def apply_chord(self, header_result_args: Any, body: Any, **_: Any) -> None:
        """Nothing to prepare."""

    def on_chord_part_return(self, request: Any, state: str, result: Any, **_: Any) -> None:
        """Keep the part; the one that makes the chord whole sends its body."""
        here = world()
        if not request.group:
            return
        here.point(f"count part {request.group_index}")
        parts = here.chords.setdefault(request.group, {})
        parts[request.group_index] = result
        body: Any = maybe_signature(request.chord, app=self.app)
        if len(parts) == here.sizes[request.group]:
            here.sends_a_body = True
            try:
                body.delay([parts[index] for index in sorted(parts)])
            finally:
                here.sends_a_body = False


# --- store ------------------------------------------------------------------------------------------------------------


class Store:
    """One worker's way to the run's store."""

    name = "memory"

    def __init__(self) -> None:
        self.raw: Any = None

    def _call(self, verb: str, key: str, call: Any, told: Any, token: str | None = None) -> Any:
        here = world()
        inside = here.here() is not None
        suffered = here.point(verb, "refused", "cut off", "outage", "long outage") if inside else None
        if suffered == "cut off":
            here.freeze()
        if suffered in {"refused", "cut off"} or here.clock.now < here.down_until:
            raise StoreUnavailable(f"simulated: {verb} is refused", may_have_landed=False)
        before, number = here.peek(key), here.ledger.verbs
        answer = call()
        alone = here.ledger.verbs == number  # else another verb came in between two statements of this one
        here.ledger.looked(key, before, here.peek(key), token if alone else None)
        told(answer)
        said = answer.answer if isinstance(answer, Decision) else answer
        here.tell(f"{verb}: {getattr(said, 'value', 'done')}")
        here.seen[f"{verb}: {getattr(said, 'value', 'done')}"] += 1
        suffered = here.point(f"{verb} answered", "unanswered", "cut off") if inside else None
        if suffered == "cut off":
            here.freeze()
        if suffered:
            raise StoreUnavailable(f"simulated: {verb} is not answered", may_have_landed=True)
        return answer

    def claim(self, operation: Operation, *, lease: float, ttl: float, dead_fence: int | None = None) -> Decision:
        worker = world().here()

        def told(decision: Decision) -> None:
            world().ledger.claimed(worker, operation, decision)  # type: ignore[arg-type]

        call = lambda: self.raw.claim(operation, lease=lease, ttl=ttl, dead_fence=dead_fence)  # noqa: E731
        answer: Decision = self._call("claim", operation.key, call, told)
        return answer

    def complete(self, claim: Claim, outcome: Outcome, *, connection: Any = None) -> Ended:
        told = lambda ended: world().ledger.completed(claim, ended)  # noqa: E731
        message, asked = claim.operation.delivery.message_id, world().ledger.asked
        asked.setdefault(message, world().clock.now)
        answer: Ended = self._call("complete", claim.key, lambda: self.raw.complete(claim, outcome), told, claim.token)
        asked.pop(message, None)
        return answer

    def release(self, claim: Claim, reason: Release, *, successor: Successor | None = None) -> Ended:
        told = lambda ended: world().ledger.released(claim, ended)  # noqa: E731
        call = lambda: self.raw.release(claim, reason, successor=successor)  # noqa: E731
        answer: Ended = self._call(f"release {reason.value}", claim.key, call, told, claim.token)
        return answer

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, Renewal]:
        here = world()
        if here.clock.now < here.down_until:
            raise StoreUnavailable("simulated: renew is refused", may_have_landed=False)
        before = {claim.key: here.peek(claim.key) for claim in claims}
        answers: Mapping[str, Renewal] = self.raw.renew(claims)
        for claim in claims:
            here.ledger.looked(claim.key, before[claim.key], here.peek(claim.key), claim.token)
            here.ledger.renewed(claim, answers[claim.token])
            here.tell(f"renew {claim.operation.delivery.message_id[:8]}: {answers[claim.token].value}")
        return answers

    def settle(self, key: str, message_id: str) -> None:
        told = lambda _: world().ledger.settles(key, message_id)  # noqa: E731
        self._call("settle", key, lambda: self.raw.settle(key, message_id), told)

    def note_parked(self, key: str, message_id: str, generation: int, count: int) -> None:
        call = lambda: self.raw.note_parked(key, message_id, generation, count)  # noqa: E731
        self._call("note_parked", key, call, lambda _: None)

    def get(self, key: str) -> Record | None:
        record: Record | None = self.raw.get(key)
        return record

    def purge(self, limit: int) -> int:
        return 0

    def close(self) -> None: ...


class SimulatedHeartbeat(Heartbeat):
    """The library's own, moved by the scheduler in place of its thread."""

    def _wake_by(self, moment: float) -> None: ...

    quiet_until = 0.0
    """It stood still with its worker, and wakes a little later."""

    def forget(self) -> None:
        """Its process died."""
        self.quiet_until = 0.0
        self._leases.clear()
        self._leftovers.clear()

    def next(self, now: float) -> float:
        """When it has something to do."""
        dues = [lease.due for lease in self._leases.values()]
        return max(
            self.quiet_until, min([*dues, *([now + RETRY_AFTER] if self._leftovers else [])], default=float("inf"))
        )

    def late(self, now: float) -> None:
        """Let it come a second after the worker it belongs to."""
        self.quiet_until = now + 1.0

    def work(self, now: float) -> None:
        """Do what is due."""
        if now < self.quiet_until:
            return
        due = [lease for lease in self._leases.values() if lease.due <= now]
        try:
            if due:
                self.beat(due)
            if self._leftovers:
                self._give_back()
        except StoreError:
            pass
