"""What the workers run; every body leaves a mark in the Redis that holds the results."""

from __future__ import annotations

import time
from typing import Any

from celery import shared_task

from celery_idem import IdempotentTask, Policy

ONCE = Policy(key="{order}", fingerprint=["order"], lease=5)


class Marked(IdempotentTask):
    """Leaves its marks."""

    abstract = True

    def mark(self, word: str) -> None:
        """Write down what happened."""
        self.backend.client.rpush("marks", f"{self.name.rpartition('.')[2]} {word}")

    def wait_for(self, key: str) -> None:
        """Until the test sets it."""
        deadline = time.monotonic() + 60
        while not self.backend.client.exists(key):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{key} never came")
            time.sleep(0.02)


@shared_task(base=Marked, bind=True, idempotency=ONCE)
def charge(self: Any, order: int, go: str = "") -> str:
    """Charge once the test lets it."""
    self.mark("begins")
    if go:
        self.wait_for(go)
    self.mark("charges")
    return f"receipt {order}"


@shared_task(base=Marked, bind=True, idempotency=ONCE)
def ship(self: Any, receipt: str, order: int) -> str:
    """Ship what was charged."""
    self.mark("ships")
    return f"{receipt}, shipped"
