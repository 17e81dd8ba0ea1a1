"""What a message says of itself beyond keys and arguments: what follows it, who reads its value, whether it is acked.

Celery keeps all of it on the request, and nowhere says so in one word.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery.utils import log

if TYPE_CHECKING:
    from celery_idem.task import Idempotent

logger = logging.getLogger("celery_idem")
SCALARS = (str, int, float, bytes, bool, type(None))


def continues(request: Any) -> bool:
    """Whether Celery has something to publish when this message ends."""
    return bool(request.callbacks or request.errbacks or request.chain or request.chord)


def own_copy(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments the body may change, without changing what is parked or delivered anew after a lost lease."""
    if all(isinstance(value, SCALARS) for value in (*args, *kwargs.values())):
        return args, kwargs
    try:
        copied: tuple[Sequence[Any], Mapping[str, Any]] = copy.deepcopy((args, kwargs))
    except Exception:  # noqa: BLE001  a pickled argument may refuse to be copied; then the body gets the message's own
        return args, kwargs
    return copied


def result_ignored(task: Idempotent, request: Any) -> bool:
    """Whether nobody asked for the result to be kept, by the message's own word or else the task's."""
    own = request.__dict__.get("ignore_result")  # the class default would look like an explicit False
    return bool(task.ignore_result if own is None else own)


def tell_started(task: Idempotent, request: Any) -> None:
    """Store STARTED where the task tracks it, as Celery would have done before the claim."""
    if not task.tracks_started or request.is_eager or result_ignored(task, request):
        return
    meta = {"pid": os.getpid(), "hostname": request.hostname}
    try:
        task.backend.store_result(request.id, meta, "STARTED", request=request)
    except Exception as error:  # noqa: BLE001  it only informs; the result itself is still to come
        logger.warning("STARTED of %s[%s] was not stored: %s", task.name, request.id, error)


def cut_by_shutdown(task: Idempotent, request: Any, error: BaseException) -> bool:
    """Whether a cold shutdown ended the greenlet of a message that is not acked: gevent's pool would ack it now.

    The pool ends a revoked task's greenlet in the same way, but not in a signal handler, nor after one.
    """
    if type(error).__name__ != "GreenletExit" or not task.acks_late or request.is_eager:
        return False
    from celery.worker import state

    return state.should_terminate is not None or bool(getattr(log, "_in_sighandler", False))
