"""Test your tasks against redelivery, duplicates, killed workers and time, in pytest.

In your ``conftest.py``::

    pytest_plugins = ["celery_idem.testing"]

``idem`` is an ``Idem``: your app on a memory broker and a memory store, each message handed to Celery's own tracer.
``idem_worker`` makes a ``Worker``: a real ``celery worker`` on your own servers, which can be SIGKILLed at a named
point. In a suite that starts its workers itself, ``KillPoints`` is that part alone::

    points = KillPoints(tmp_path / "points")
    start_worker(env=points.env, arguments=points.arguments)
    killed = points.kill(before="completion", task="shop.charge")
    charge.delay(7, 50)
    killed.wait(10)

Points: claim, body, completion, publish, settle, ack; ``points`` says what each is.

PYTEST_DONT_REWRITE: there is no assert in here, and a suite may import it before pytest does.
"""

from __future__ import annotations

from celery_idem.testing.clock import ManualClock
from celery_idem.testing.idem import Idem
from celery_idem.testing.killing import KillPoints, Strike
from celery_idem.testing.message import Delivered, Message
from celery_idem.testing.points import POINTS, Point
from celery_idem.testing.worker import Worker

pytest_plugins = ("celery_idem.testing.plugin",)
"""Read by pytest, which is not imported here: a worker under test need not have it."""

__all__ = ["POINTS", "Delivered", "Idem", "KillPoints", "ManualClock", "Message", "Point", "Strike", "Worker"]
