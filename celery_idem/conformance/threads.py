"""Calls that start at the same instant, each on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from celery_idem.conformance.case import Breach

PATIENCE = 30.0
"""Real seconds any thread may take."""


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returned, or the exception it raised, all of them started at once on threads of their own."""
    start = threading.Barrier(len(calls))
    answers: list[Any] = [Breach(f"a call did not come back within {PATIENCE:g} s")] * len(calls)

    def run(number: int) -> None:
        start.wait(PATIENCE)
        try:
            answers[number] = calls[number]()
        except Exception as error:  # noqa: BLE001  the case judges it
            answers[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for answer in answers:
        if isinstance(answer, Breach):
            raise answer
    return answers
