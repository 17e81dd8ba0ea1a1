"""Inside a worker: every place an action's steps come to, by name, written down or died at.

A place is a line of ``celery_idem/governed`` that is about to run for the first time in its step, the moment before or
after an SQL statement, a stage of an HTTP exchange, or one of the delivery's moments (``celery_idem.testing.points``).
Each belongs to a call: a verb of the store, a request, a publishing. So the statements of each are told apart. Where
``<action id>.plan`` names a place, the action dies there, once; where it says ``watch``, a list of places is left.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import celery_idem.governed
from celery_idem.testing.points import Point, listen

GOVERNED = str(Path(celery_idem.governed.__file__).parent) + os.sep
WATCH = "watch"
CHILD, WORKER = "child", "worker"
"""Who dies: the process that runs the step, or its whole process group."""
STEPS = ("dispatch", "observe", "verify", "complete")
VERBS = (
    *("now", "get_action", "list_receipts", "lease_next", "lease_dispatched_observation", "defer_leased"),
    *("begin_owner_authorized_dispatch", "begin_dispatched_observation", "defer_dispatched_observation"),
    *("accept", "verify", "complete", "fail_attempt"),
)


class Place(NamedTuple):
    """Where an action can die."""

    step: str
    tries: int
    """How often the step had retried itself."""
    call: str
    """The verb of the store, ``PUT``, ``GET``, ``publish`` or ``message``; ``step`` for what is between those."""
    kind: str
    """``line``, ``sql``, ``http`` or ``message``."""
    what: str

    def __str__(self) -> str:
        return "\t".join(map(str, self))

    @classmethod
    def read(cls, text: str) -> Place:
        """The place that was written as this line."""
        step, tries, call, kind, what = text.split("\t")
        return cls(step, int(tries), call, kind, what)


class Run:
    """One delivery of one step, with what is planned for its action."""

    def __init__(self, here: Path, step: str, tries: int, action_id: str) -> None:
        self.step, self.tries = step, tries
        self.calls: Counter[str] = Counter()
        self.call = "step"
        self.whats: Counter[tuple[str, str]] = Counter()
        self._plan = here / f"{action_id}.plan"
        self._who, self._place = "", ""
        self._lines: set[str] = set()
        if self._plan.exists():
            self._who, _, self._place = self._plan.read_text().partition("\n")

    @property
    def traced(self) -> bool:
        """Whether it matters which lines this delivery executes."""
        step, tries, _, kind, _ = Place.read(self._place) if self._place else ("", -1, "", "", "")
        return self._who == WATCH or (kind == "line" and (step, tries) == (self.step, self.tries))

    def line(self, file: str, number: int) -> None:
        """This line is about to run."""
        what = f"{file}:{number}"
        if what not in self._lines:
            self._lines.add(what)
            self.at("line", what)

    def counted(self, kind: str, what: str) -> None:
        """The same thing may happen several times in one call."""
        self.whats[self.call, what] += 1
        times = self.whats[self.call, what]
        self.at(kind, what if times == 1 else f"{what} ({times})")

    def at(self, kind: str, what: str, call: str = "") -> None:
        """Write the place down, or die at it."""
        place = str(Place(self.step, self.tries, call or self.call, kind, what))
        if self._who == WATCH:
            with self._plan.with_suffix(".places").open("a") as places:
                places.write(place + "\n")
        elif place == self._place:
            self._die()

    def _die(self) -> None:
        try:
            os.close(os.open(self._plan.with_suffix(".struck"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        if self._who == WORKER:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


_now: Run | None = None
"""A prefork child does one thing at a time."""


def arm(here: Path) -> None:
    """Have the steps that this process and its children run obey the plans in this directory."""
    from celery.signals import task_postrun, task_prerun

    def begin(task: Any = None, args: Any = None, **_: Any) -> None:
        global _now
        step = task.name.rpartition(".")[2]
        if task.name.startswith("celery_idem.governed.") and step in STEPS:
            _now = Run(here, step, task.request.retries or 0, args[0])
            if _now.traced:
                sys.settrace(_called)

    def end(**_: Any) -> None:
        sys.settrace(None)

    task_prerun.connect(begin, weak=False)
    task_postrun.connect(end, weak=False)
    listen(_moment)
    _watch_calls()
    _watch_sql()
    _watch_http()


def _called(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
    if not frame.f_code.co_filename.startswith(GOVERNED):
        return None
    file = frame.f_code.co_filename[len(GOVERNED) :]
    if file == "settings.py":  # read once per process, before its first action: no later one comes there to be killed
        return None

    def stepped(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line" and _now is not None:
            _now.line(file, frame.f_lineno)
        return stepped

    return stepped


def _moment(point: Point, delivery: Any) -> None:
    if _now is not None:
        _now.at("message", f"before {point}", "message")


def _watch_calls() -> None:
    from celery_idem.governed.chain import StepTask
    from celery_idem.governed.http import HTTPEndpoint
    from celery_idem.governed.sql.store import SQLActionStore

    for verb in VERBS:
        _wrap(SQLActionStore, verb, verb)
    _wrap(HTTPEndpoint, "execute", "PUT")
    _wrap(HTTPEndpoint, "observe", "GET")
    _wrap(StepTask, "apply_async", "publish")


def _wrap(owner: type, name: str, call: str) -> None:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        run = _now
        if run is None or run.call != "step":
            return inner(*args, **kwargs)
        run.calls[call] += 1
        run.call = call if run.calls[call] == 1 else f"{call} {run.calls[call]}"
        try:
            return inner(*args, **kwargs)
        finally:
            run.call = "step"

    setattr(owner, name, outer)


def _watch_sql() -> None:
    from sqlalchemy import Engine, event

    def before(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if _now is not None:
            _now.counted("sql", f"before {_shortly(statement)}")

    def after(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if _now is not None:
            _now.counted("sql", f"after {_shortly(statement)}")

    event.listen(Engine, "before_cursor_execute", before)
    event.listen(Engine, "after_cursor_execute", after)


def _shortly(statement: str) -> str:
    """``UPDATE action``, ``INSERT action_receipt``, ``SELECT action_event``, ``COMMIT``."""
    verb = re.split(r"\W", statement.strip(), maxsplit=1)[0].upper()
    table = re.search(r"(?:FROM|INTO|UPDATE)\s+celery_idem_(\w+)", statement)
    lock = re.search(r"pg_advisory\w+", statement)
    return " ".join(filter(None, (verb, table and table[1], lock and lock[0])))


def _watch_http() -> None:
    import httpx

    handle = httpx.HTTPTransport.handle_request

    def watched(self: Any, request: Any) -> Any:
        def stage(name: str, _info: Any) -> None:
            if _now is not None:
                _now.counted("http", name)

        request.extensions["trace"] = stage
        return handle(self, request)

    httpx.HTTPTransport.handle_request = watched  # type: ignore[method-assign]
