"""Governed actions as Celery tasks: propose, approve or reject, and the chain dispatch | observe | verify | complete.

Importing this module gives every app that has ``governed_store`` its steps, each an ``IdempotentTask`` whose claim is
no more than a mutex: it remembers no result, for the action's row alone decides (``steps``). A step that is not over
retries itself, with a delay, and holds no slot meanwhile. A message that was lost is ``recovery``'s.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from celery import chain
from celery._state import connect_on_app_finalize
from celery.app import app_or_default
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from celery.signals import celeryd_init, worker_process_shutdown, worker_ready, worker_shutdown

from celery_idem.core.context import current
from celery_idem.core.policy import Policy
from celery_idem.errors import ActionFailed, ActionTransitionError, ConfigurationError
from celery_idem.governed import steps
from celery_idem.governed.catalog import catalog as default_catalog
from celery_idem.governed.gate import PASSED, message_approval, refused, validate_owner_gate
from celery_idem.governed.records import GATE_RECEIPT_KIND, STATE_PROPOSED, Action
from celery_idem.governed.refusals import digest_or_refusal
from celery_idem.governed.settings import GovernedSettings, given_settings
from celery_idem.governed.signing import ApprovalKeys
from celery_idem.governed.telling import Teller
from celery_idem.parking import confirmed_producer
from celery_idem.task import IdempotentTask

if TYPE_CHECKING:
    from celery import Celery

    from celery_idem.governed.catalog import Catalog
    from celery_idem.governed.sql.store import SQLActionStore

logger = logging.getLogger("celery_idem")

STEPS = ("dispatch", "observe", "verify", "complete")
NAME = "celery_idem.governed"
GATE_KEY = "owner-gate"
AFTER = 0.25
"""Seconds a step comes after its action is due: a moment too early, and it would have to come once more."""
_IDS = uuid.UUID("6f1c0d0e-9d1c-4f0b-8f57-0b1f6b8f6a55")

_governances: WeakKeyDictionary[Celery, Governance] = WeakKeyDictionary()
_making = threading.Lock()


# --- what one app needs ----------------------------------------------------------------------------------------------


def governance_of(app: Celery) -> Governance:
    """The app's one ``Governance``."""
    found = _governances.get(app)
    if found is None:
        with _making:
            found = _governances.setdefault(app, Governance(app))
    return found


class Governance:
    """Settings, action store, keys and catalog of one app in one process, each made when first needed."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.catalog: Catalog = default_catalog
        self.tell = Teller(app)
        self._settings: GovernedSettings | None = None
        self._store: SQLActionStore | None = None
        self._keys: ApprovalKeys | None = None

    @property
    def settings(self) -> GovernedSettings:
        """The checked settings; ``ConfigurationError`` names what is wrong."""
        if self._settings is None:
            self._settings = GovernedSettings.load(given_settings(self.app.conf))
        return self._settings

    @property
    def keys(self) -> ApprovalKeys | None:
        """Whose signature makes an approval; None where none is asked for."""
        if self._keys is None and self.settings["approval_keys"] is not None:
            self._keys = ApprovalKeys(self.settings["approval_keys"])
        return self._keys

    @property
    def store(self) -> SQLActionStore:
        """The action store of this process, unopened until its first verb."""
        if self._store is None:
            with _making:
                if self._store is None:
                    self._store = self.open_store()
        return self._store

    def open_store(self) -> SQLActionStore:
        """An action store of the caller's own, to be closed by the caller; what happens in it is told."""
        from celery_idem.governed.sql.store import SQLActionStore

        url = self.settings["store"]
        if not url:
            raise ConfigurationError(
                "governed_store is not set: name a database, such as postgresql+psycopg2://user@host/db or "
                "sqlite:///actions.db"
            )
        store = SQLActionStore(url, timeout=self.settings["store_timeout"])
        store.listener = self.tell
        return store

    def check(self) -> None:
        """``ConfigurationError`` where settings, keys or the store's URL are wrong; nothing is opened."""
        if self.settings["store"]:
            self.open_store().close()
        _ = self.keys

    def close(self) -> None:
        """Give back every connection."""
        if self._store is not None:
            self._store.close()


def _close_all(**_: Any) -> None:
    for governance in list(_governances.values()):
        governance.close()


# --- before the mutation ---------------------------------------------------------------------------------------------


def propose(
    action_type: str,
    payload: Any,
    *,
    idempotency_key: str,
    source: str | None = None,
    source_ref: str | None = None,
    actor: str = "proposer",
    app: Celery | None = None,
    catalog: Catalog | None = None,
) -> Action:
    """The proposed action; nothing happens until an owner approves it.

    Args:
        action_type: a name that ``@action`` registered.
        payload: what the type's model accepts, or an instance of it.
        idempotency_key: the same key with the same content is the same action.
        source: who proposes, for operators; the app's name by default. ``source_ref`` is the proposer's own reference.
        catalog: where the type is looked up; the default one, where left out.

    Raises:
        PayloadRefused: the payload does not fit; nothing was proposed.
        ActionIdempotencyConflict: the key was used for something else.
    """
    governance = _of(app)
    kind = (catalog or governance.catalog).get(action_type)
    return governance.store.propose(
        idempotency_key,
        source or governance.app.main or "celery",
        kind.name,
        kind.payload_of(payload),
        source_ref=source_ref,
        actor=actor,
    )


def approve(
    action_id: str,
    evidence: Mapping[str, Any] | None = None,
    *,
    principal: str | None = None,
    lifetime: float = 3600.0,
    channel: str = "direct",
    thread_id: str | None = None,
    event_id: str | None = None,
    link: Any = None,
    link_error: Any = None,
    app: Celery | None = None,
) -> Action:
    """Record the owner's approval and publish the action's chain; the first to approve wins.

    That it was published is not needed for it to happen: a worker's sweep publishes what was lost.

    Args:
        evidence: what ``message_approval``, ``grant_approval`` or a shape of your own makes, signed where keys are
            configured. Without it, a message approval by ``principal`` is made of the arguments that follow.
        lifetime: seconds until the approval ends; the mutation must have begun by then.
        thread_id: of the conversation or form; the action's id by default. ``event_id``, of the answer, is drawn.
        link: signatures called with the result, and ``link_error`` those called when a step fails. They go with the
            message: a chain that had to be replaced has none. The signals of ``telling`` miss nothing.

    Raises:
        GateRefused: the evidence does not cover this action, now; nothing was written.
        AlreadyDecided: somebody was first; nothing was changed.
    """
    governance = _of(app)
    store = governance.store
    action = store.get_action(action_id)
    if (evidence is None) == (principal is None):
        raise ConfigurationError("approve() takes either evidence= or principal=: say who approves, or give the proof")
    if isinstance(evidence, str):
        raise ConfigurationError(f"approve() got evidence={evidence!r:.80}: say who approves as principal=…")
    if evidence is not None and not isinstance(evidence, Mapping):
        raise refused("evidence")
    if evidence is None or action["state"] == STATE_PROPOSED:
        now = store.now()
        if evidence is None:
            evidence = message_approval(
                action,
                principal=str(principal),
                channel=channel,
                thread_id=thread_id or action_id,
                event_id=event_id or str(uuid.uuid4()),
                decided_at=now,
                lifetime=lifetime,
            )
        if action["state"] == STATE_PROPOSED:  # else whoever was first is the better answer
            _judge(governance, action, evidence, now)
    chain_id = new_chain()
    action, _ = store.approve(action_id, evidence, chain_id=chain_id, receipt_key=GATE_KEY)
    if action["chain_id"] == chain_id:
        _publish_or_tell(governance, action_id, chain_id, link, link_error)
    return action


def _judge(governance: Governance, action: Action, evidence: Mapping[str, Any], now: float) -> None:
    """Refuse now what would be refused when it is used, so that the approver learns of it."""
    receipt = {
        "action_id": action["action_id"],
        "receipt_key": GATE_KEY,
        "kind": GATE_RECEIPT_KIND,
        "status": PASSED,
        "external_id": evidence.get("approval_id"),
        "evidence": evidence,
        "evidence_sha256": digest_or_refusal(evidence, "evidence"),
    }
    kinds = governance.catalog
    # Whoever approves need not know how it is done; the worker that does it has the last word.
    grantable = action["action_type"] not in kinds or kinds.get(action["action_type"]).grantable
    validate_owner_gate(action, [receipt], now=now, grantable=grantable, keys=governance.keys)


def _publish_or_tell(governance: Governance, action_id: str, chain_id: str, link: Any, link_error: Any) -> None:
    canvas = governed_chain(action_id, chain_id, governance.app)
    for add, signatures in ((canvas.link, link), (canvas.link_error, link_error)):
        for signature in signatures if isinstance(signatures, (list, tuple)) else [signatures]:
            if signature is not None:
                add(signature)
    try:
        canvas.apply_async()
    except Exception as error:
        if governance.app.conf.task_always_eager:  # the chain's own
            raise
        logger.warning(
            "action %s is approved, and its message was not published (%r): a worker's sweep publishes it after "
            "governed_sweep_grace",
            action_id,
            error,
        )


def reject(action_id: str, reason: str, *, principal: str, app: Celery | None = None) -> Action:
    """End an action that was not dispatched yet.

    Raises:
        AlreadyDecided: it was rejected before.
        ActionTransitionError: it is dispatched or over.
    """
    return _of(app).store.reject(action_id, reason, actor=principal)


def _of(app: Celery | None) -> Governance:
    app = app_or_default(app)
    register(app)
    return governance_of(app)


# --- the chain -------------------------------------------------------------------------------------------------------


def governed_chain(action_id: str, chain_id: str, app: Celery | None = None) -> Any:
    """The action's four steps, as a chain to be published; its message ids follow from ``chain_id``.

    Args:
        chain_id: the action's own; a chain by any other name comes to nothing once it has to wait.
    """
    app = app_or_default(app)
    register(app)
    return chain(
        *(
            app.tasks[f"{NAME}.{step}"].si(action_id, chain_id).set(task_id=str(uuid.uuid5(_IDS, f"{chain_id}/{step}")))
            for step in STEPS
        ),
        app=app,
    )


def new_chain(instead_of: str | None = None) -> str:
    """A chain's name, which says how many chains the sweep published before it."""
    return f"{0 if instead_of is None else sweeps_of(instead_of) + 1}-{uuid.uuid4()}"


def sweeps_of(chain_id: str | None) -> int:
    """How many chains the sweep published before this one; 0 for a name of somebody else's."""
    count = (chain_id or "").partition("-")[0]
    return int(count) if count.isdecimal() and len(count) < 4 else 0


class StepTask(IdempotentTask):
    """The base of the steps: a mutex per step and action, endless retries, every message confirmed by the broker."""

    abstract = True
    max_retries = None
    throws = (ActionFailed,)
    idempotency = Policy(
        key="{action_id}",
        fingerprint=["action_id"],
        scope=None,
        ttl=0,
        on_conflict="park",
        verify=None,
        on_unknown="run",
        storage_policy="fail_open",
        max_deliveries=1_000_000_000,
        replay_failures=(),
        cacheable=None,
        on_replay=None,
    )

    def apply_async(  # type: ignore[override]  # the rest passes through
        self, args: Any = None, kwargs: Any = None, task_id: str | None = None, producer: Any = None, **options: Any
    ) -> Any:
        """Like Celery's own; a lost connection takes no step with it, the chain's next ones included."""
        if producer is not None or self.app.conf.task_always_eager:
            return super().apply_async(args, kwargs, task_id, producer, **options)
        with confirmed_producer(self.app) as confirming:
            return super().apply_async(args, kwargs, task_id, confirming, **options)


def dispatch(self: StepTask, action_id: str, chain_id: str) -> dict[str, Any]:
    """Consume the gate and make the one mutation."""
    return _taken(self, steps.Dispatch, action_id, chain_id)


def observe(self: StepTask, action_id: str, chain_id: str) -> dict[str, Any]:
    """Look for a mutation whose answer is in doubt."""
    return _taken(self, steps.Observe, action_id, chain_id)


def verify(self: StepTask, action_id: str, chain_id: str) -> dict[str, Any]:
    """See that what was accepted is there."""
    return _taken(self, steps.Verify, action_id, chain_id)


def complete(self: StepTask, action_id: str, chain_id: str) -> dict[str, Any]:
    """End it, and hand its result to whoever is linked."""
    return _taken(self, steps.Complete, action_id, chain_id)


def _taken(task: StepTask, kind: type[steps.Step], action_id: str, chain_id: str) -> dict[str, Any]:
    governance, running = governance_of(task.app), current()
    fence = 0 if running is None else running.fence
    step = kind(
        governance.store,
        governance.catalog,
        governance.keys,
        lease=governance.settings["lease"],
        owner=f"{socket.gethostname()[:64]}:{os.getpid()}:{fence}:{secrets.token_hex(8)}",
        action_id=action_id,
        chain_id=chain_id,
        tries=task.request.retries or 0,
    )
    try:
        action = step.run()
    except SoftTimeLimitExceeded:
        later = steps.Later("the soft time limit struck")
    except steps.Later as error:
        later = error
    else:
        told = ("action_id", "state", "result") if kind is steps.Complete else ("action_id", "state")
        return {name: action[name] for name in told}
    if step.stale:
        raise Ignore(f"action {action_id} has another chain, which does the waiting ({later.why})")
    if task.request.is_eager:
        raise ActionTransitionError(f"action {action_id} has to wait ({later.why}): let a worker run its chain")
    raise task.retry(exc=later, countdown=later.delay + AFTER)


def sweep(self: Any) -> dict[str, int]:
    """Publish what lost its message, and end what nobody may look for any more; for beat."""
    from celery_idem.governed import recovery

    return recovery.sweep(self.app)


# --- how an app gets them --------------------------------------------------------------------------------------------

_BODIES: tuple[Callable[..., Any], ...] = (dispatch, observe, verify, complete)


def register(app: Celery) -> None:
    """Give the app its steps, its sweep and, in a worker, the thread that sweeps; doing it again changes nothing."""
    from celery_idem.governed.recovery import SweepStep

    if f"{NAME}.sweep" in app.tasks:
        return
    for body in _BODIES:
        app.task(name=f"{NAME}.{body.__name__}", base=StepTask, bind=True, shared=False, lazy=False)(body)
    app.task(name=f"{NAME}.sweep", bind=True, shared=False, lazy=False, acks_late=True)(sweep)
    app.steps["worker"].add(SweepStep)


def _offer(app: Celery) -> None:
    given = given_settings(app.conf)
    if given.get("store"):
        register(app)
    elif given:  # without the store, or with its name misspelt: a worker has to be told
        from celery_idem.governed.recovery import SweepStep

        app.steps["worker"].add(SweepStep)


def _begin_worker(instance: Any = None, **_: Any) -> None:
    _offer(instance.app)


def _tell_if_it_does_nothing(sender: Any, **_: Any) -> None:
    """A worker that knows how actions are done, and not where they are."""
    if len(default_catalog) and not given_settings(sender.app.conf).get("store"):
        logger.warning(
            "celery_idem: action types are registered (%s, …), and governed_store is not set: this worker cannot work "
            "on governed actions",
            next(iter(default_catalog)).name,
        )


connect_on_app_finalize(_offer)
worker_ready.connect(_tell_if_it_does_nothing, weak=False, dispatch_uid="celery_idem.governed.ready")
celeryd_init.connect(_begin_worker, weak=False, dispatch_uid="celery_idem.governed.begin")
worker_process_shutdown.connect(_close_all, weak=False, dispatch_uid="celery_idem.governed.close")
worker_shutdown.connect(_close_all, weak=False, dispatch_uid="celery_idem.governed.close")
