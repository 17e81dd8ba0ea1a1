"""The moments of one delivery at which a test can kill or hold a worker, named by what has not happened yet.

claim       the message arrived; nothing was asked of the store
body        the key is claimed; the body has not begun
completion  the body is through, its effect is there; nothing is recorded
publish     the outcome is recorded; result, links, the next chain step and the chord part are not out
settle      all of that is out; the record does not say so yet
ack         the record says so; the broker still has the message

The library knows nothing of this: while somebody listens, the methods of ``Delivering`` that begin and end these steps
are wrapped. A delivery that is not protected (mode off, a plain task) passes no point.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

from celery_idem.delivery import Delivering

Point = Literal["claim", "body", "completion", "publish", "settle", "ack"]
POINTS: tuple[Point, ...] = get_args(Point)
Listener = Callable[[Point, Delivering], None]

BEGINS: dict[str, Point] = {"handle": "claim", "body": "body", "told": "settle"}
ENDS: dict[str, Point] = {"handle": "publish", "body": "completion", "over": "ack"}

_listeners: list[Listener] = []
_unwrapped: dict[str, Any] = {}


def listen(listener: Listener) -> None:
    """Call ``listener`` at every point, in the thread of the delivery, until ``unlisten``."""
    _listeners.append(listener)
    for name in {*BEGINS, *ENDS} - {*_unwrapped}:
        _unwrapped[name] = getattr(Delivering, name)
        setattr(Delivering, name, _wrapped(name, _unwrapped[name]))


def unlisten(listener: Listener) -> None:
    """Stop calling it; the last one to go leaves ``Delivering`` as it was."""
    _listeners.remove(listener)
    if not _listeners:
        while _unwrapped:
            name, method = _unwrapped.popitem()
            setattr(Delivering, name, method)


def checked(before: str) -> Point:
    """The point of that name; a ``ValueError`` that lists them where there is none."""
    for point in POINTS:
        if point == before:
            return point
    raise ValueError(f"before={before!r}: the points are {', '.join(POINTS)}")


def _wrapped(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(delivery: Delivering, *args: Any) -> Any:
        _reach(BEGINS.get(name), delivery)
        try:
            return method(delivery, *args)
        finally:  # an exception of the body is an end of it, too
            _reach(ENDS.get(name), delivery)

    return call


def _reach(point: Point | None, delivery: Delivering) -> None:
    if point is not None:
        for listener in tuple(_listeners):
            listener(point, delivery)
