"""A whole app by one setting: ``task_annotations = ("celery_idem:annotation",)``, or ``install(app)``.

Celery shows every task class to its annotations when it binds it, whatever decorated it and whenever that was. Ours
puts ``Idempotent`` in front of the class's bases, in place; whether a task is switched on is asked later, by name, of
``idempotency_tasks``. Ack settings, and everything else of the task's own, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from celery import Task

from celery_idem.app import ensure_installed, runtime_of
from celery_idem.core.policy import Policy
from celery_idem.errors import ConfigurationError

SETTING = "celery_idem:annotation"


class annotation:  # noqa: N801  read in a settings file, where it is called like a function
    """What ``task_annotations`` names. Put it before your own: Celery stops at the first that answers for a task."""

    @staticmethod
    def annotate(task: type[Any]) -> None:
        """Switch the class on, and answer nothing, so that Celery asks the next annotation as well."""
        app = task._app  # noqa: SLF001  ``task.app`` may bind it
        runtime_of(app).whole_app = True
        _switch_on_if_meant(app, task)
        runtime_of(app).forget(task.name)
        ensure_installed(app)


def install(app: Any) -> None:
    """Switch a whole app on from code: the same as the line in ``task_annotations``.

    Reads no configuration before Celery does. Tasks bound already are switched on as well.
    """
    runtime_of(app).whole_app = True
    ensure_installed(app)
    if app.configured:
        _annotate(app)
    else:
        app.on_after_configure.connect(_configured, sender=app, weak=False)


def _configured(sender: Any, **_: Any) -> None:
    _annotate(sender)


def _annotate(app: Any) -> None:
    given = app.conf.task_annotations or ()
    annotations = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if SETTING not in annotations:
        app.conf.task_annotations = (SETTING, *annotations)
        app.__dict__.pop("annotations", None)  # Celery keeps what it once made of the setting
    switch_on_bound(app)


def switch_on_bound(app: Any) -> None:
    """Switch on the tasks that were bound before the setting was known, or kept from us by another annotation."""
    for task in list(app._tasks.values()):  # noqa: SLF001  ``app.tasks`` would finalize the app
        if type(task).__bound__:
            _switch_on_if_meant(app, type(task))
            type(task).bind(app)


def _switch_on_if_meant(app: Any, cls: type[Any]) -> None:
    """A class that cannot be switched on is an error only where ``idempotency_tasks`` means it."""
    try:
        switch_on(cls)
    except ConfigurationError:
        if runtime_of(app).patterns.of(str(cls.name)) not in {None, False}:
            raise


def _refuse_names(cls: type[Any], ours: type[Any]) -> None:
    """A name of the application's that is one of ours as well would break both."""
    needed = {name for name in vars(ours).keys() - dir(Task) - {"idempotency"} if not name.startswith("__")}
    for base in cls.__mro__[: cls.__mro__.index(Task)]:
        for name in sorted(needed & vars(base).keys()):
            raise ConfigurationError(
                f"task {cls.name or cls.__qualname__} cannot be switched on by a setting: {base.__qualname__}.{name} "
                "has a name of ours: give it another, or leave the task out with idempotency_tasks"
            )


def _put_in_front(cls: type[Any], ours: type[Any]) -> None:
    """Make ours a base of the class, and no longer one of those below it, whose order would contradict."""
    below = [sub for sub in _below(cls) if ours in sub.__bases__]
    before = {sub: sub.__bases__ for sub in (cls, *below)}
    first = next(i for i, base in enumerate(cls.__bases__) if issubclass(base, Task))
    for sub in below:
        sub.__bases__ = tuple(base for base in sub.__bases__ if base is not ours)
    for place in (0, first):  # a base without a __dict__, such as ABC or Generic, has to stay the first
        try:
            cls.__bases__ = (*before[cls][:place], ours, *before[cls][place:])
        except TypeError as error:
            why = error
        else:
            return
    for sub in below:
        sub.__bases__ = before[sub]
    if cls.__bases__[first] is Task:
        raise why
    _put_in_front(cls.__bases__[first], ours)  # whose own first base is such a one


def _below(cls: type[Any]) -> Iterator[type[Any]]:
    for sub in type.__subclasses__(cls):
        yield sub
        yield from _below(sub)


def switch_on(cls: type[Any]) -> None:
    """Put the claim in front of a task class and all that derives from it, in place.

    Raises:
        ConfigurationError: Python cannot change the class's bases.
    """
    from celery_idem.task import Idempotent

    if cls is Task or issubclass(cls, Idempotent) or str(cls.name).startswith("celery."):
        return
    _refuse_names(cls, Idempotent)
    said = [base.__dict__["idempotency"] for base in reversed(cls.__mro__) if "idempotency" in base.__dict__]
    request = cls.Request
    try:
        _put_in_front(cls, Idempotent)
    except TypeError as error:
        raise ConfigurationError(
            f"task {cls.name or cls.__qualname__} cannot be switched on by a setting ({error}): give it "
            "base=IdempotentTask, or leave it out with idempotency_tasks"
        ) from error
    if request != Task.Request:
        cls.Request = request  # ``start_strategy`` puts ours in front of it
    for policy in said:
        if isinstance(policy, Policy):
            cls.idempotency_policy = policy.over(cls.idempotency_policy)
        elif "idempotency" not in cls.__dict__:  # the application's own word, which means something else there
            cls.idempotency = policy
    cls.take_policy()
