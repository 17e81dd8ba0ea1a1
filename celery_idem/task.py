"""IdempotentTask: the class users subclass. It stamps what is published and hands what arrives to ``delivery``.

``__call__`` is the one door: everything after it in Celery's tracer keys on what it returns or raises, so returning a
stored value continues the canvas as the first run did. ``Idempotent`` is all of it but the ack settings: what
``optin`` puts in front of the bases of a task that a setting switches on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery import Task
from celery.canvas import Signature
from celery.exceptions import Reject, Retry
from celery.utils import uuid
from celery.utils.imports import symbol_by_name

from celery_idem import publish
from celery_idem.app import ensure_installed, runtime_of
from celery_idem.core.canonical import NoCanonicalForm
from celery_idem.core.context import RUNNING, RunContext, current
from celery_idem.core.effects import Effects
from celery_idem.core.keys import KeySource
from celery_idem.core.policy import UNSET, Policy
from celery_idem.core.settings import PER_TASK, PREFIX
from celery_idem.delivery import Delivering
from celery_idem.errors import ConfigurationError, KeyMissing
from celery_idem.message import tell_started
from celery_idem.parking import confirmed_producer, unpublished
from celery_idem.signals import ATTRIBUTE


def door(own: Any) -> Callable[..., Any]:
    """Put the claim in front of a ``__call__``; what its own body calls goes straight through.

    Args:
        own: as it stands in the class: a function, a property, a static or class method, anything Python can call.
    """

    @functools.wraps(own)
    def claiming(self: Idempotent, *args: Any, **kwargs: Any) -> Any:
        inner = own.__get__(self, type(self)) if hasattr(own, "__get__") else own
        request = self.request
        delivery = request.__dict__.get(ATTRIBUTE)
        if delivery is not None and delivery.in_body:  # super().__call__(), or a body that calls its own task
            return inner(*args, **kwargs)
        runtime = runtime_of(self.app)
        if not request.called_directly and runtime.protects(self) and not runtime.is_broadcast(request.delivery_info):
            return Delivering(self, runtime, request, inner, args, kwargs).handle()
        if not request.called_directly:
            tell_started(self, request)
        running = RUNNING.set(self._unclaimed(args, kwargs))
        try:
            return inner(*args, **kwargs)
        finally:
            RUNNING.reset(running)

    claiming.is_door = True  # type: ignore[attr-defined]
    return claiming


def _body(self: Idempotent, *args: Any, **kwargs: Any) -> Any:
    """Run the task's own body, and whatever ``__call__`` a base of the user's puts around it."""
    # Celery's own __call__ would push a copied request, whose children and mutations are lost; a base of the user's
    # that stands between must run all the same.
    if self.request.called_directly or _stands_between(type(self), "__call__") or _is_patched():
        return super(Idempotent, self).__call__(*args, **kwargs)
    return self.run(*args, **kwargs)


def _stands_between(cls: type[Idempotent], method: str) -> bool:
    """Whether a base of the user's has its own method between ours and Celery's."""
    below = False
    for base in cls.__mro__:
        if below and method in base.__dict__:
            return base is not Task
        below = below or base is Idempotent
    return True


def _is_patched() -> bool:
    """Whether somebody put a ``__call__`` of their own into Celery's class, as Celery itself tells it."""
    return getattr(Task.__call__, "__module__", None) not in {"celery.app.task", "celery.app.trace"}


class Idempotent(Task):  # type: ignore[type-arg]  # not subscriptable before Celery 5.6
    """What makes the effect of a task happen once per key. Subclass ``IdempotentTask``."""

    idempotency_policy = Policy()
    always_idempotent = False
    """Whether the class says so itself; else the app's settings do."""
    Request = "celery_idem.received:Request"
    tracks_started = False
    """Celery's ``track_started``, taken over: STARTED is written after the claim."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.take_policy()

    @classmethod
    def take_policy(cls) -> None:
        """Lay the class's own ``idempotency=Policy(…)`` over its bases', and claim before its own ``__call__``."""
        policy = cls.__dict__.get("idempotency")
        if isinstance(policy, Policy):
            del cls.idempotency
            cls.idempotency_policy = policy.over(cls.idempotency_policy)
        own = inspect.getattr_static(cls, "__call__")
        if not hasattr(own, "is_door"):
            cls.__call__ = door(own)  # type: ignore[method-assign]

    @classmethod
    def bind(cls, app: Any) -> Any:
        """Bind to the app; the worker's check and signal handlers come along."""
        bound = super().bind(app)
        cls.take_policy()  # of a class that was made before its base was switched on
        # STARTED must be written after the claim, or a dropped copy overwrites the final state.
        if cls.track_started:
            cls.tracks_started, cls.track_started = True, False
        ensure_installed(app)
        runtime_of(app).forget(cls.name)
        return bound

    if TYPE_CHECKING:
        idempotency: RunContext | Any  # a subclass's body says ``idempotency = Policy(…)``
    else:

        @property
        def idempotency(self) -> RunContext:
            """The running attempt: key, fence, attempt, reclaimed, check()."""
            running = current()
            if running is not None:
                return running
            return self._unclaimed(self.request.args or (), self.request.kwargs or {})

    # --- publishing ------------------------------------------------------------------------------------------------

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        idempotency_key: str | None = None,
        **options: Any,
    ) -> Any:
        """Like Celery's own, with the message's key and fingerprint stamped on it.

        Args:
            idempotency_key: wins over the policy's key source.

        Raises:
            KeyMissing: the key source yields nothing for these arguments; nothing was published.
        """
        runtime = runtime_of(self.app)
        given = {"task_id": task_id, "producer": producer, "link": link, "link_error": link_error, "shadow": shadow}
        given = {name: value for name, value in given.items() if value is not None} | options
        if runtime.protects(self):
            fits = getattr(self, "__header__", None) if self.typing else None
            if fits is not None:
                fits(*(args or ()), **(kwargs or {}))  # Celery's own TypeError, before any word about keys
            message_id = task_id or uuid()
            call = args or (), kwargs or {}
            place = publish.place_in_canvas(options)
            try:
                given["headers"] = publish.stamped_headers(
                    self, runtime.policy_of(self), *call, message_id, options.get("headers"), idempotency_key, place
                )
            except (KeyMissing, NoCanonicalForm):
                if runtime.mode != "observe":  # there the worker says what would have been refused
                    raise
            if task_id is None and _stands_between(type(self), "apply_async"):
                # The application's own may choose the id, the arguments too: the worker derives the stamp from those.
                given.get("headers", {}).pop(publish.STAMP_HEADER, None)
            else:
                given["task_id"] = message_id
        succeeds = options.get("retries") or options.get("replaced_task_nesting")
        if succeeds and producer is None and not self.app.conf.task_always_eager:
            # The attempt that sends its own successor is acked on the strength of it.
            with confirmed_producer(self.app) as given["producer"]:
                return super().apply_async(args, kwargs, **given)
        return super().apply_async(args, kwargs, **given)

    def apply(
        self, args: Any = None, kwargs: Any = None, *more: Any, idempotency_key: str | None = None, **options: Any
    ) -> Any:
        """Like Celery's own, at once and here; a key given wins over the policy's key source."""
        ours = {publish.KEY_HEADER: idempotency_key, publish.DEPTH_HEADER: options.get("replaced_task_nesting")}
        ours = {name: value for name, value in ours.items() if value is not None}
        if ours:
            options["headers"] = {**(options.get("headers") or {}), **ours}
        return super().apply(args, kwargs, *more, **options)

    def retry(  # type: ignore[override]
        self, args: Any = None, kwargs: Any = None, exc: Any = None, throw: bool = True, **options: Any
    ) -> Any:
        """Like Celery's own; the successor is published confirmed, and refused once the lease is lost.

        Where the broker does not take it, or does not say so, nothing is lost: the message goes back to the broker,
        waits for the successor until that is due for a minute, and then takes its place.
        """
        delivery = self.request.__dict__.get(ATTRIBUTE)
        if delivery is not None:
            delivery.refuse_if_lost()
        try:
            retried = super().retry(args, kwargs, exc, throw, **options)
        except Retry as retry:
            if delivery is not None and getattr(retry, "sig", None) is not None:
                delivery.announce(retry)
            raise
        except Reject as given_up:  # Celery's own word on a successor that could not be published
            theirs = given_up is exc or (isinstance(exc, type) and isinstance(given_up, exc))  # no retry was left
            if theirs or delivery is None or delivery.observe:
                raise
            due: Any = options.get("eta") or options.get("countdown")
            if due is None:
                due = self.default_retry_delay
            delivery.announce(Retry(when=due))
            raise unpublished(self, self.request, getattr(given_up, "reason", given_up)) from given_up
        if delivery is not None and isinstance(retried, Retry):
            delivery.announce(retried)
        return retried

    def replace(self, sig: Any) -> Any:
        """Like Celery's own; refused once the lease is lost, and the same ids if the body has to run again."""
        delivery = self.request.__dict__.get(ATTRIBUTE)
        return super().replace(sig if delivery is None else delivery.replacement(sig))

    def on_replace(self, sig: Any) -> Any:
        """Like Celery's own, and the delivery learns whose Ignore follows."""
        delivery = self.request.__dict__.get(ATTRIBUTE)
        if delivery is None:
            return super().on_replace(sig)
        sig = delivery.replacing(sig)
        if self.request.is_eager or type(sig) is not Signature:
            return super().on_replace(sig)  # a canvas drops the producer; its idempotent tasks see to it themselves
        with confirmed_producer(self.app) as producer:
            return super().on_replace(sig.set(producer=producer))

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, queue: Any = None, **options: Any
    ) -> Any:
        """Like Celery's own, for a successor: the key stays, the fingerprint follows changed arguments."""
        request = self.request if request is None else request
        given = options.pop("headers", None)
        headers = publish.copied(request.headers if given is None else given)
        runtime = runtime_of(self.app)
        if request.id is not None and runtime.protects(self):
            policy = runtime.policy_of(self)
            delivery = request.__dict__.get(ATTRIBUTE)
            stamp = None if delivery is None else delivery.stamp  # a body may have changed the arguments since
            if stamp is None:
                stamp = publish.stamp_of(self, policy, request, request.args or (), request.kwargs or {})
            if args is not None or kwargs is not None:
                changed = (request.args if args is None else args, request.kwargs if kwargs is None else kwargs)
                anew = publish.derive(self, Policy(key="message").over(policy), *changed, request.id)
                stamp = publish.Stamp(stamp.task, stamp.message_id, stamp.key, anew.fingerprint)
            headers[publish.STAMP_HEADER] = stamp.header()
        parked = publish.read_parked(request.headers or {})
        if parked.expires is not None:
            options.setdefault("expires", parked.expires)
        return super().signature_from_request(request, args, kwargs, queue, headers=headers, **options)

    def signature_of_copy(self, request: Any, **options: Any) -> Any:
        """The message itself once more, as it is parked: same id, arguments, canvas and queue."""
        return super().signature_from_request(request, **options)

    def start_strategy(self, app: Any, consumer: Any, **kwargs: Any) -> Any:
        """Like Celery's own; a Request class of the application's comes behind ours."""
        from celery_idem import received  # what it imports is for workers alone

        request = symbol_by_name(self.Request)
        if not issubclass(request, received.Request):
            type(self).Request = type(request.__name__, (received.Request, request), {})  # type: ignore[assignment]
        return super().start_strategy(app, consumer, **kwargs)

    # --- running ---------------------------------------------------------------------------------------------------

    __call__ = door(_body)

    def _unclaimed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RunContext:
        around = current()  # a direct call in a body is part of that body
        effects = Effects(lambda: runtime_of(self.app).engine_for(self)) if around is None else around.effects
        return RunContext(lambda: self._key_of(args, kwargs), effects=effects)

    def _key_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The key these arguments would have; empty where a bare call has none."""
        runtime, request = runtime_of(self.app), self.request
        policy = runtime.policy_of(self)
        if request.id is None and KeySource.parse(policy.key).kind == "message":
            return ""
        try:
            stamp = publish.stamp_of(self, policy, request, args, kwargs)
            return publish.operation_of(self, policy, runtime, request, stamp, continues=False).key
        except (KeyMissing, TypeError):
            return ""


class IdempotentTask(Idempotent):
    """A task whose effect happens once per key, and whose duplicates get the first result.

    Options of ``@app.task(base=IdempotentTask, …)``, besides Celery's own:
        idempotency: a ``Policy``. A subclass's policy is laid over its base's.
        key: shorthand for ``Policy(key=…)``.

    Messages are acked late and given back when a worker process dies, unless the task says otherwise: a task that
    is acked before it ran happens at most once.
    """

    abstract = True
    always_idempotent = True
    acks_late = True
    reject_on_worker_lost = True

    @classmethod
    def take_policy(cls) -> None:
        """Like the base's, where ``key=`` alone may stand for a policy and any other word of one is refused."""
        policy = cls.__dict__.get("idempotency")
        if policy is not None and not isinstance(policy, (Policy, property)):
            raise ConfigurationError(f"idempotency={policy!r}: give a Policy, such as Policy(key='order:{{order_id}}')")
        own = policy if isinstance(policy, Policy) else Policy()
        if cls.__dict__.get("_decorated"):
            _refuse_stray(cls.__dict__, own)
        super().take_policy()
        if "key" in cls.__dict__:
            cls.idempotency_policy = Policy(key=cls.__dict__["key"]).over(cls.idempotency_policy)


def _refuse_stray(options: Mapping[str, Any], own: Policy) -> None:
    """A policy's word outside of the policy would be a task without protection, and nothing would say so."""
    ours = {*PER_TASK, "once", "unique_on"} - {"key", "serializer"}
    prefixed = (name for name in options if name.startswith(PREFIX) and name != "idempotency_policy")
    stray = sorted([*ours & options.keys(), *prefixed])
    if stray:
        raise ConfigurationError(
            f"task {options.get('name')}: {', '.join(stray)} is no task option: say idempotency=Policy(…), "
            "of which key= alone may stand outside"
        )
    if "key" in options and own.key is not UNSET:
        raise ConfigurationError(f"task {options.get('name')} has a key of its own and one in its Policy: keep one")


__all__ = ["Idempotent", "IdempotentTask"]
