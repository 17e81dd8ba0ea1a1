"""``SQLActionStore``: the ledger on PostgreSQL or SQLite, each verb one transaction.

What each verb means is in ``governed.store``; what it does, in the module of its concern: ``leasing``, ``dispatch``,
``observation``, ``lifecycle``, ``admission``, ``chains``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, tuple_
from sqlalchemy.engine import Engine

from celery_idem.errors import ActionStoreError
from celery_idem.governed import records
from celery_idem.governed.sql import admission, chains, dispatch, leasing, lifecycle, observation, schema
from celery_idem.governed.sql.arguments import (
    MAX_PAGE,
    checked_evidence,
    checked_number,
    checked_text,
    checked_whole,
    scope,
)
from celery_idem.governed.sql.ledger import Ledger
from celery_idem.governed.sql.transaction import Row, Transaction, intact, no_action, projected

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_LEASE = 86_400.0


class SQLActionStore:
    """Governed actions in a database: made by processes, threads and hosts at once, judged by the database's clock.

    Args:
        url_or_engine: ``postgresql+psycopg2://…``, ``sqlite:///file``, or an SQLAlchemy engine, which stays yours.
        clock: seconds since 1970 in place of the database's own; for tests.
        timeout: seconds no verb outlives.
        options: for ``create_engine``.
    """

    def __init__(
        self,
        url_or_engine: str | Engine,
        *,
        clock: Callable[[], float] | None = None,
        timeout: float = 5.0,
        **options: Any,
    ) -> None:
        self._ledger = Ledger(url_or_engine, timeout, clock, options)

    @property
    def listener(self) -> Callable[[records.Event], None] | None:
        """Called with every event this store appended, and its ``action_type``, after it is committed."""
        return self._ledger.listener

    @listener.setter
    def listener(self, listener: Callable[[records.Event], None] | None) -> None:
        self._ledger.listener = listener

    def create_schema(self) -> None:
        """Make the tables, indexes and triggers that are missing; doing it again changes nothing."""
        self._ledger.create_schema()

    def close(self) -> None:
        """Close the idle connections of this process; the store opens new ones when it is used again."""
        self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def now(self) -> float:
        """Seconds since 1970 by the clock that judges."""
        return self._ledger.read(lambda tx: tx.now)

    # --- before the mutation -----------------------------------------------------------------------------------------

    def propose(
        self,
        idempotency_key: str,
        source: str,
        action_type: str,
        payload: Any,
        *,
        source_ref: str | None = None,
        action_id: str | None = None,
        actor: str = "proposer",
    ) -> records.Action:
        """The action of this idempotency key: a new one, ``proposed``, or the same one again.

        Args:
            payload: what JSON can say exactly, 64 KiB at most.

        Raises:
            ActionIdempotencyConflict: the key was used for other content.
        """
        return self._ledger.run(
            lambda tx: lifecycle.propose(
                tx,
                idempotency_key,
                source,
                action_type,
                payload,
                source_ref=source_ref,
                action_id=action_id,
                actor=actor,
            )
        )

    def gate(
        self,
        action_id: str,
        evidence: Any,
        *,
        receipt_key: str = "owner-gate",
        external_id: str | None = None,
        actor: str = "gate",
    ) -> tuple[records.Action, records.Receipt]:
        """Record an owner's decision as it is, and move ``proposed -> gated``; it is judged when it is used.

        A second one, under another key, is recorded too, and then the action is never dispatched.

        Args:
            external_id: the evidence's own ``approval_id`` where it is left out.
        """
        return self._ledger.run(lambda tx: lifecycle.gate(tx, action_id, evidence, receipt_key, external_id, actor))

    def approve(
        self, action_id: str, evidence: Mapping[str, Any], *, chain_id: str, receipt_key: str = "owner-gate"
    ) -> tuple[records.Action, records.Receipt]:
        """Record the first decision, and name the chain that may act on it, in one transaction.

        Raises:
            AlreadyDecided: somebody decided before; the same evidence again is answered with what is there.
        """
        checked_evidence(evidence)

        return self._ledger.run(lambda tx: lifecycle.approve(tx, action_id, evidence, chain_id, receipt_key))

    def reject(self, action_id: str, reason: str, *, actor: str) -> records.Action:
        """End an action that is not dispatched: ``failed``, without a dead letter, for somebody wanted it so.

        Raises:
            AlreadyDecided: it was rejected before.
            ActionTransitionError: it is dispatched or ended.
        """
        return self._ledger.run(lambda tx: lifecycle.reject(tx, action_id, reason, actor))

    def add_receipt(
        self,
        action_id: str,
        receipt_key: str,
        kind: str,
        status: str,
        evidence: Any,
        *,
        external_id: str | None = None,
        observed_at: float | None = None,
    ) -> records.Receipt:
        """Append evidence of your own, in any state; the kinds of gate, contract and looks are refused."""
        return self._ledger.run(
            lambda tx: lifecycle.add_receipt(
                tx, action_id, receipt_key, kind, status, evidence, external_id, observed_at
            )
        )

    # --- leases ------------------------------------------------------------------------------------------------------

    def recover_expired_leases(
        self,
        *,
        source: str | None = None,
        source_prefix: str | None = None,
        action_type: str | None = None,
        action_ids: Sequence[str] | None = None,
    ) -> None:
        """See ``ActionStore``."""
        conditions = scope(source, source_prefix, action_type, action_ids)
        after = ""
        while ids := self._ledger.read(partial(leasing.lapsed, scope=conditions, after=after)):
            for action_id in ids:
                self._ledger.run(partial(leasing.recover, action_id=action_id))
            after = ids[-1]

    def lease_next(
        self,
        owner: str,
        *,
        lease_seconds: float,
        states: Sequence[str],
        source: str | None = None,
        source_prefix: str | None = None,
        action_type: str | None = None,
        action_ids: Sequence[str] | None = None,
    ) -> records.Action | None:
        """See ``ActionStore``."""
        _checked_lease(owner, lease_seconds)
        conditions = scope(source, source_prefix, action_type, action_ids)
        return self._leased(lambda tx: leasing.lease_next(tx, owner, lease_seconds, states, conditions))

    def lease_dispatched_observation(
        self,
        owner: str,
        *,
        lease_seconds: float,
        source: str | None = None,
        source_prefix: str | None = None,
        action_type: str | None = None,
        action_ids: Sequence[str] | None = None,
    ) -> records.Action | None:
        """See ``ActionStore``."""
        _checked_lease(owner, lease_seconds)
        conditions = scope(source, source_prefix, action_type, action_ids)
        return self._leased(lambda tx: observation.lease_observation(tx, owner, lease_seconds, conditions))

    def _leased(self, lease: Callable[[Transaction], tuple[records.Action | None, bool]]) -> records.Action | None:
        more = True
        while more:
            action, more = self._ledger.run(lease)
        return action

    def defer_leased(
        self, action_id: str, owner: str, reason: str, delay_seconds: float, *, event_type: str = records.DEFERRED
    ) -> records.Action:
        """See ``ActionStore``."""
        return self._ledger.run(lambda tx: lifecycle.defer(tx, action_id, owner, reason, delay_seconds, event_type))

    # --- the mutation, and looking for it ----------------------------------------------------------------------------

    def begin_owner_authorized_dispatch(
        self,
        action_id: str,
        owner: str,
        *,
        gate_receipt_key: str,
        expected_source: str,
        expected_source_ref: str | None,
        expected_action_type: str,
        expected_payload: Any,
        expected_approval_id: str,
        expected_decision_id: str,
        expected_execution_digest: str,
        observation_window_seconds: float,
        max_observations: int,
        gate_validator: records.GateValidator,
    ) -> records.Action:
        """See ``ActionStore``; ``AdmissionClosed`` where the switch is off."""
        expected = dispatch.Expected(
            gate_receipt_key,
            expected_source,
            expected_source_ref,
            expected_action_type,
            expected_payload,
            expected_approval_id,
            expected_decision_id,
            expected_execution_digest,
            observation_window_seconds,
            max_observations,
        )
        expected.check()
        if not callable(gate_validator):
            raise ActionStoreError("gate_validator cannot be called: give owner_gate_validator(…), or one of your own")
        return self._ledger.run(lambda tx: dispatch.begin(tx, action_id, owner, expected, gate_validator))

    def begin_dispatched_observation(
        self, action_id: str, owner: str, execution_digest: str
    ) -> tuple[records.Action, records.Receipt | None]:
        """See ``ActionStore``."""
        return self._ledger.run(lambda tx: observation.begin(tx, action_id, owner, execution_digest))

    def defer_dispatched_observation(
        self,
        action_id: str,
        owner: str,
        execution_digest: str,
        observation_receipt_key: str,
        reason: str,
        delay_seconds: float,
    ) -> records.Action:
        """See ``ActionStore``."""
        return self._ledger.run(
            lambda tx: observation.defer(
                tx, action_id, owner, execution_digest, observation_receipt_key, reason, delay_seconds
            )
        )

    # --- after the mutation ------------------------------------------------------------------------------------------

    def accept(
        self,
        action_id: str,
        owner: str,
        receipt_key: str,
        kind: str,
        evidence: Any,
        *,
        external_id: str | None = None,
        result: Any = None,
        keep_lease: bool = True,
    ) -> tuple[records.Action, records.Receipt]:
        """See ``ActionStore``; ``keep_lease=False`` releases the lease in the same transaction."""
        return self._ledger.run(
            lambda tx: lifecycle.accept(
                tx,
                action_id,
                owner,
                receipt_key,
                kind,
                evidence,
                external_id=external_id,
                result=result,
                keep_lease=keep_lease,
            )
        )

    def verify(
        self,
        action_id: str,
        owner: str,
        receipt_key: str,
        evidence: Any,
        *,
        qualifying_receipt_keys: Sequence[str],
        keep_lease: bool = True,
    ) -> tuple[records.Action, records.Receipt]:
        """See ``ActionStore``; ``keep_lease=False`` releases the lease in the same transaction."""
        return self._ledger.run(
            lambda tx: lifecycle.verify(
                tx,
                action_id,
                owner,
                receipt_key,
                evidence,
                qualifying=qualifying_receipt_keys,
                keep_lease=keep_lease,
            )
        )

    def complete(self, action_id: str, owner: str, result: Any) -> records.Action:
        """See ``ActionStore``."""
        return self._ledger.run(lambda tx: lifecycle.complete(tx, action_id, owner, result))

    def fail_attempt(self, action_id: str, owner: str, error: str, retryable: bool) -> records.Action:
        """See ``ActionStore``."""
        return self._ledger.run(lambda tx: lifecycle.fail(tx, action_id, owner, error, retryable))

    # --- the switch and the chains -----------------------------------------------------------------------------------

    def admission(self) -> dict[str, Any]:
        """Whether mutations are admitted: ``open``, ``reason``, ``actor``, ``changed_at``."""
        return self._ledger.read(admission.current)

    def set_admission(self, is_open: bool, reason: str, *, actor: str) -> dict[str, Any]:
        """Open or close the switch; once a closing is answered, no dispatch that saw it open can commit."""
        return self._ledger.run(lambda tx: admission.change(tx, is_open, reason, actor))

    def stranded(self, grace: float, *, limit: int = 100) -> list[dict[str, Any]]:
        """Actions that have lost their chain: at work, due, not leased, and quiet for ``grace`` seconds."""
        checked_number("grace", grace, 0.0, 1e9)
        checked_whole("limit", limit, 1, MAX_PAGE)
        return self._ledger.run(lambda tx: chains.stranded(tx, grace, limit))

    def replace_chain(self, action_id: str, old_chain_id: str | None, new_chain_id: str) -> bool:
        """Name a new chain where the old one is still named; False where somebody was faster or it is over."""
        return self._ledger.run(lambda tx: chains.replace(tx, action_id, old_chain_id, new_chain_id))

    # --- reading -----------------------------------------------------------------------------------------------------

    def get_action(self, action_id: str) -> records.Action:
        """See ``ActionStore``."""
        return self._ledger.read(lambda tx: projected(_seen(tx, action_id)))

    def list_receipts(self, action_id: str) -> Sequence[records.Receipt]:
        """See ``ActionStore``."""
        return self._ledger.read(lambda tx: tx.receipts(_seen(tx, action_id)["action_id"]))

    def list_events(self, action_id: str) -> Sequence[records.Event]:
        """The action's history, in the order it happened."""
        return self._ledger.read(lambda tx: tx.history(_seen(tx, action_id)["action_id"]))

    def list_dead_letters(self, *, limit: int = 100, after: str | None = None) -> Sequence[records.DeadLetter]:
        """Actions that ended so that a person should look, the first to end first.

        Args:
            after: the ``action_id`` of the last one of the page before.
        """
        c = schema.dead_letter.c
        checked_whole("limit", limit, 1, MAX_PAGE)

        def work(tx: Transaction) -> list[records.DeadLetter]:
            query = select(c.action_id, c.reason, c.created_at).order_by(c.letter_id).limit(limit)
            if after is not None:
                last = tx.row(select(c.letter_id).where(c.action_id == checked_text("after", after)))
                if last is None:
                    raise no_action(after)
                query = query.where(c.letter_id > last["letter_id"])
            return list(tx.rows(query))

        return self._ledger.read(work)

    def find(
        self,
        state: str | None = None,
        source: str | None = None,
        action_type: str | None = None,
        *,
        limit: int = 100,
        after: str | None = None,
    ) -> list[records.Action]:
        """A page of actions, the oldest first; those whose payload was changed in the database are left out.

        Args:
            after: the ``action_id`` of the last one of the page before.
        """
        checked_whole("limit", limit, 1, MAX_PAGE)
        if state is not None and checked_text("state", state) not in records.ACTION_STATES:
            raise ActionStoreError(f"state = {state!r:.80}: it is one of {', '.join(sorted(records.ACTION_STATES))}")
        c = schema.action.c

        def work(tx: Transaction) -> list[records.Action]:
            query = select(schema.action).where(*scope(source, None, action_type, None))
            query = query.order_by(c.created_at, c.action_id).limit(limit)
            if state is not None:
                query = query.where(c.state == state)
            last = None if after is None else _seen(tx, after)
            found: list[records.Action] = []
            while len(found) < limit:
                place = (
                    ()
                    if last is None
                    else (tuple_(c.created_at, c.action_id) > (last["created_at"], last["action_id"]),)
                )
                rows = tx.rows(query.where(*place))
                found += [projected(row) for row in rows if intact(row)]
                if len(rows) < limit:
                    break
                last = rows[-1]
            return found[:limit]

        return self._ledger.read(work)


def _checked_lease(owner: str, lease_seconds: float) -> None:
    checked_text("owner", owner)
    checked_number("lease_seconds", lease_seconds, 0.001, MAX_LEASE)


def _seen(tx: Transaction, action_id: str) -> Row:
    """The action without holding it."""
    checked_text("action_id", action_id)
    found = tx.row(select(schema.action).where(schema.action.c.action_id == action_id))
    if found is None:
        raise no_action(action_id)
    return found
