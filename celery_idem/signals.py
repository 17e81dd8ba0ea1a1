"""Celery's signals, where a claim that stayed open is ended: only after Celery told everybody.

``task_success`` and ``task_failure`` come after the result, links, errbacks and chord part are out; ``task_postrun``
always comes, and closes what neither of them did. Each message's ``Delivering`` hangs on its request.
"""

from __future__ import annotations

from typing import Any

from celery.exceptions import OperationalError
from celery.signals import task_failure, task_postrun, task_retry, task_success, worker_process_shutdown

ATTRIBUTE = "celery_idem_delivery"
"""Where the request carries its delivery."""


def connect() -> None:
    """Connect the handlers, once per process."""
    task_success.connect(_told, weak=False, dispatch_uid="celery_idem.told")
    task_failure.connect(_failed, weak=False, dispatch_uid="celery_idem.failed")
    task_retry.connect(_retried, weak=False, dispatch_uid="celery_idem.retried")
    task_postrun.connect(_over, weak=False, dispatch_uid="celery_idem.over")
    worker_process_shutdown.connect(_close, weak=False, dispatch_uid="celery_idem.close")


def _delivery(task: Any) -> Any:
    request = getattr(task, "request", None)
    return None if request is None else request.__dict__.get(ATTRIBUTE)


def _told(sender: Any = None, **_: Any) -> None:
    delivery = _delivery(sender)
    if delivery is not None:
        delivery.told()


def _failed(sender: Any = None, exception: Any = None, **_: Any) -> None:
    delivery = _delivery(sender)
    if delivery is None:
        return
    # Celery makes a failure of a task that returned a value, where the broker does not take what follows it.
    if delivery.returned and isinstance(exception, OperationalError):
        delivery.untold()
    else:
        delivery.told()


def _retried(sender: Any = None, **_: Any) -> None:
    _over(sender)


def _over(task: Any = None, **_: Any) -> None:
    delivery = _delivery(task)
    if delivery is not None:
        delivery.over()


def _close(**_: Any) -> None:
    from celery_idem.app import close_all

    close_all()
