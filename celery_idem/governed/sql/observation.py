"""Looking for an effect instead of making it again: the recovery contract, the journal of looks, the ambiguous end.

Contract and journal are believed only as far as they are what this library writes, agree with the events, and bind the
action as it is. Anything else grants no further look: the action ends as ambiguous, for a person to find out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement

from celery_idem.errors import ActionTransitionError, PayloadRefused
from celery_idem.governed import records, refusals
from celery_idem.governed.canonical import digest_json, same
from celery_idem.governed.sql.arguments import checked_number, legible, said
from celery_idem.governed.sql.transaction import Row, Transaction, expects, intact, projected

RECOVERY_SCHEMA = "celery_idem.dispatch_recovery.v1"
OBSERVATION_SCHEMA = "celery_idem.dispatch_observation.v1"
MAX_WINDOW = 3600.0
MAX_OBSERVATIONS = 100
ENDED_AT_ONCE = 20
"""Actions ended in one transaction at most: thousands, after an outage, would outlast its deadline, and end never."""

Contract = Mapping[str, Any]


class Untrusted(Exception):
    """Contract or journal is not what this library wrote; the text is the reason."""


# --- the contract and its journal ------------------------------------------------------------------------------------


def write_contract(tx: Transaction, row: Row, execution_digest: str, window: float, budget: int) -> records.Receipt:
    """Allow to look for the effect of exactly this execution, so often and so long (I5)."""
    evidence = {
        "schema": RECOVERY_SCHEMA,
        "action_id": row["action_id"],
        "action_digest": row["payload_sha256"],
        "execution_digest": execution_digest,
        "issued_at": tx.now,
        "observation_deadline": tx.now + window,
        "max_observations": budget,
    }
    key = f"dispatch-recovery:{execution_digest}"
    receipt, _ = tx.add_receipt(
        row["action_id"], key, records.RECOVERY_RECEIPT_KIND, "observation_only", evidence, execution_digest
    )
    return receipt


def contract_of(tx: Transaction, row: Row) -> Contract:
    """The action's one contract.

    Raises:
        Untrusted: there is none, or it is not what was written when the action was dispatched.
    """
    found = tx.receipts(row["action_id"], records.RECOVERY_RECEIPT_KIND)
    if len(found) != 1:
        raise Untrusted(f"{len(found)} recovery contracts")
    receipt, evidence = found[0], found[0]["evidence"]
    if not isinstance(evidence, dict):
        raise Untrusted("contract")
    digest = evidence.get("execution_digest")
    issued, deadline = evidence.get("issued_at"), evidence.get("observation_deadline")
    budget = evidence.get("max_observations")
    fields = {"schema", "action_id", "action_digest", "execution_digest"}
    right = (
        evidence.keys() == fields | {"issued_at", "observation_deadline", "max_observations"}
        and evidence["schema"] == RECOVERY_SCHEMA
        and evidence["action_id"] == row["action_id"]
        and same(evidence["action_digest"], row["payload_sha256"])
        and isinstance(digest, str)
        and receipt["receipt_key"] == f"dispatch-recovery:{digest}"
        and receipt["external_id"] == digest
        and receipt["status"] == "observation_only"
        and _is_sealed(receipt)
        and _is_time(issued)
        and _is_time(deadline)
        and receipt["created_at"] == issued
        and 0 < deadline - issued <= MAX_WINDOW + 1
        and type(budget) is int
        and 1 <= budget <= MAX_OBSERVATIONS
    )
    if not right:
        raise Untrusted("contract")
    dispatched = tx.history(row["action_id"], records.DISPATCHED)
    noted = dispatched[0]["details"] if len(dispatched) == 1 else None
    if not isinstance(noted, dict) or noted.get("contract_sha256") != receipt["evidence_sha256"]:
        raise Untrusted("contract differs from the event of its dispatch")
    return evidence


def journal_of(tx: Transaction, row: Row, contract: Contract) -> list[records.Receipt]:
    """The looks made so far, the last one last.

    Raises:
        Untrusted: it is not an unbroken list of what this library writes, or the events tell another number.
    """
    journal = tx.receipts(row["action_id"], records.OBSERVATION_RECEIPT_KIND)
    digest = contract["execution_digest"]
    before = contract["issued_at"]
    for attempt, receipt in enumerate(journal, start=1):
        evidence = receipt["evidence"]
        expected = _look(row, digest, attempt, evidence.get("started_at") if isinstance(evidence, dict) else None)
        right = (
            evidence == expected
            and receipt["receipt_key"] == _look_key(digest, attempt)
            and receipt["external_id"] == digest
            and receipt["status"] == "started"
            and _is_sealed(receipt)
            and _is_time(evidence["started_at"])
            and receipt["created_at"] == evidence["started_at"]
            and before <= evidence["started_at"] <= min(contract["observation_deadline"], tx.now)
        )
        if not right:
            raise Untrusted(f"journal, attempt {attempt}")
        before = evidence["started_at"]
    if len(journal) > contract["max_observations"]:
        raise Untrusted("journal, more looks than allowed")
    if len(journal) != len(tx.history(row["action_id"], records.OBSERVING)):
        raise Untrusted("journal differs from the events")
    return journal


def _look(row: Row, digest: str, attempt: int, started_at: Any) -> dict[str, Any]:
    return {
        "schema": OBSERVATION_SCHEMA,
        "action_id": row["action_id"],
        "action_digest": row["payload_sha256"],
        "execution_digest": digest,
        "attempt": attempt,
        "started_at": started_at,
    }


def _look_key(digest: str, attempt: int) -> str:
    return f"dispatch-observation:{digest}:{attempt:03d}"


def _is_time(value: Any) -> bool:
    seconds = refusals.epoch(value)
    return seconds is not None and seconds > 0


def _is_sealed(receipt: records.Receipt) -> bool:
    """Whether the evidence is what its digest was made of."""
    try:
        return same(receipt["evidence_sha256"], digest_json(receipt["evidence"]))
    except PayloadRefused:
        return False


def _spent(tx: Transaction, contract: Contract, looks: int) -> bool:
    return bool(looks >= contract["max_observations"] or tx.now >= contract["observation_deadline"])


# --- the verbs -------------------------------------------------------------------------------------------------------


def may_be_looked_for(tx: Transaction, row: Row, actor: str) -> bool:
    """Whether another look is allowed; where not, the action has ended as ambiguous."""
    contract: Contract | None = None
    looks = 0
    try:
        contract = contract_of(tx, row)
        looks = len(journal_of(tx, row, contract))
    except Untrusted as error:
        end_ambiguous(tx, row, actor, str(error), contract, looks)
        return False
    if _spent(tx, contract, looks):
        end_ambiguous(tx, row, actor, "exhausted", contract, looks)
        return False
    return True


def lease_observation(
    tx: Transaction, owner: str, lease_seconds: float, scope: Sequence[ColumnElement[bool]]
) -> tuple[records.Action | None, bool]:
    """Lease one dispatched action for a look; those that may not be looked for end, and the next is taken.

    Returns:
        The action, if there is one; and whether to ask again, once what ended here is committed.
    """
    query = tx.ready([records.STATE_DISPATCHED]).where(*scope)
    for _ in range(ENDED_AT_ONCE):
        row = tx.hold_first(query, skip_locked=True)
        if row is None:
            return None, False
        if not intact(row):
            end_ambiguous(tx, row, owner, "payload", None, 0)
        elif may_be_looked_for(tx, row, owner):
            return projected(tx.lease(row, owner, lease_seconds, mode="observation")), False
    return None, True


def begin(
    tx: Transaction, action_id: str, owner: str, execution_digest: str
) -> tuple[records.Action, records.Receipt | None]:
    """Journal the next look before it is made; no receipt where the action ended instead (I7)."""
    row, contract = _under_contract(tx, action_id, owner, execution_digest)
    if row["state"] == records.STATE_FAILED:
        return projected(row), None
    try:
        looks = len(journal_of(tx, row, contract))
    except Untrusted as error:
        return projected(end_ambiguous(tx, row, owner, str(error), contract, 0)), None
    if _spent(tx, contract, looks):
        return projected(end_ambiguous(tx, row, owner, "exhausted", contract, looks)), None
    attempt = looks + 1
    receipt, _ = tx.add_receipt(
        action_id,
        _look_key(execution_digest, attempt),
        records.OBSERVATION_RECEIPT_KIND,
        "started",
        _look(row, execution_digest, attempt, tx.now),
        execution_digest,
    )
    return projected(tx.change(row, records.OBSERVING, owner, {"attempt": attempt})), receipt


def defer(
    tx: Transaction, action_id: str, owner: str, execution_digest: str, receipt_key: str, reason: str, delay: float
) -> records.Action:
    """Note that the last look found nothing certain, and release the lease or end as ambiguous."""
    checked_number("delay_seconds", delay, 0.0, 86_400.0)
    reason = legible(reason)
    row, contract = _under_contract(tx, action_id, owner, execution_digest)
    if row["state"] == records.STATE_FAILED:
        return projected(row)
    try:
        journal = journal_of(tx, row, contract)
    except Untrusted as error:
        return projected(end_ambiguous(tx, row, owner, str(error), contract, 0))
    if not journal or journal[-1]["receipt_key"] != receipt_key:
        last = journal[-1]["receipt_key"] if journal else "none"
        raise ActionTransitionError(
            f"{receipt_key!r} is not the last look at action {action_id}, that is {last}: a later one has the word"
        )
    if _spent(tx, contract, len(journal)):
        return projected(end_ambiguous(tx, row, owner, "exhausted", contract, len(journal), found=reason))
    # Not later than the deadline, so that somebody comes by to end it.
    due = min(tx.now + delay, contract["observation_deadline"])
    return projected(tx.release(row, owner, reason, due - tx.now, records.UNRESOLVED))


def _under_contract(tx: Transaction, action_id: str, owner: str, execution_digest: str) -> tuple[Row, Contract]:
    """The held dispatched action and its contract; the ended action, where its contract cannot be believed."""
    row = tx.hold(action_id)
    tx.leased_to(row, owner)
    expects(row, records.STATE_DISPATCHED, "an observation")
    projected(row)  # of a payload that was changed nothing more is said; its lapsed lease ends it
    try:
        contract = contract_of(tx, row)
    except Untrusted as error:
        return end_ambiguous(tx, row, owner, str(error), None, 0), {}
    if not same(contract["execution_digest"], execution_digest):
        raise ActionTransitionError(
            f"the contract of action {action_id} is for another execution: build the request again from the action and "
            "its gate"
        )
    return row, contract


def end_ambiguous(
    tx: Transaction, row: Row, actor: str, reason: str, contract: Contract | None, looks: int, *, found: str = ""
) -> Row:
    """End a dispatched action of which nobody may find out more by himself: it may have had its effect, or not."""
    spent = reason == "exhausted"
    if not spent:
        why = f"nobody may look for its effect any more ({reason})"
    elif looks:
        counted = "1 look" if looks == 1 else f"{looks} looks"
        why = f"{counted} found nothing certain" + (f", the last one: {found}" if found else "")
    else:
        why = "the time to look for it was over before anybody did"
    told = (
        f"ambiguous: the mutation may have happened, and {why}: look at the endpoint before anything is proposed again"
    )
    result = {
        "status": "ambiguous",
        "execution_digest": None if contract is None else contract["execution_digest"],
        "observations": looks,
        "reason": reason,
    }
    details = {"reason": reason, "observations": looks} | ({"found": found} if found else {})
    ended = tx.change(
        row,
        records.AMBIGUOUS,
        actor,
        details,
        state=records.STATE_FAILED,
        last_error=told,
        result=said(result, "result"),
    )
    tx.bury(row["action_id"], told)
    return ended
