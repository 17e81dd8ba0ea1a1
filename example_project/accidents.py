"""Accidents on order: the demo plans one for an order, and it happens there once, at that moment, in the worker."""

from __future__ import annotations

import os
import signal
import time
from typing import Literal

from example_project.ledger import opened

Moment = Literal["before the charge", "after the charge", "before the ack"]
Kind = Literal["slow", "child killed", "worker killed"]
SLOW = 2.5  # seconds


def plan(order_id: str, moment: Moment, kind: Kind) -> None:
    """Have it happen the next time somebody gets there."""
    with opened() as ledger:
        ledger.execute("INSERT INTO accident VALUES (?, ?, ?)", (order_id, moment, kind))


def happen(moment: Moment, order_id: str) -> None:
    """Suffer what is planned for this moment; only the first to come here does."""
    with opened() as ledger:
        here = "order_id = ? AND moment = ?"
        planned = ledger.execute(f"SELECT kind FROM accident WHERE {here}", (order_id, moment)).fetchall()
        struck = planned and ledger.execute(f"DELETE FROM accident WHERE {here}", (order_id, moment)).rowcount
    kind = planned[0][0] if struck else None
    if kind == "slow":
        time.sleep(SLOW)
    elif kind == "child killed":  # what the OOM killer does
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "worker killed":  # what a power cut does: the worker and its processes, at once
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
