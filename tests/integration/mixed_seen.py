"""Runs the mixed application in one mode, and tells what observers saw in words that two runs have in common."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from celery import _state
from celery.result import GroupResult

from celery_idem.app import runtime_of
from tests.support.workers import TaskApp, wait_until

PART = """
from celery import shared_task
from {name} import ran

@shared_task(name="mixed.part")
def part(x):
    ran()
    return x
"""
OURS = ("idempotency_", "celery_idem_")
"""Beginnings of the names in a request or a message that are ours alone."""
PASSING = {"timestamp", "local_received", "clock", "utcoffset", "pid", "runtime", "date_done"}
"""Fields that no two runs have in common."""
UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:[+-]\d\d:\d\d|Z)?")
LOGGED = re.compile(r"\w+/\w+\] (?:\S+: )?(Task (\S+)\[([^\]]+)\] .*)")
POLLS = "celery.chord_unlock"
ENDS = {"SUCCESS": "task-succeeded", "FAILURE": "task-failed", "RETRY": "task-retried"}


@dataclass(frozen=True)
class State:
    """A call whose result ends in this state."""

    name: str


@dataclass(frozen=True)
class NoResult:
    """A call that stores no result, and whose last run ends in this state."""

    state: str


class Mixed:
    """The application with one worker; ``results`` by name once it is started."""

    def __init__(self, source: str, broker: str, backend: str | None, settings: Mapping[str, Any]) -> None:
        self.tasks = TaskApp(source, broker=broker, backend=backend, settings=settings)
        parts = self.tasks.path(f"{self.tasks.name}_parts")
        parts.mkdir()
        (parts / "__init__.py").touch()
        (parts / "tasks.py").write_text(PART.format(name=self.tasks.name))
        known = set(_state._on_app_finalizers)
        self.module = self.tasks.module
        _state._on_app_finalizers.intersection_update(known)  # else later apps of this process have its shared tasks
        self.app = self.tasks.app
        self.worker = self.tasks.worker(concurrency=2, loglevel="INFO")
        self.results: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self._stop = threading.Event()
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._told: list[dict[str, Any]] = []

    def start(self, calls: Mapping[str, Callable[[Any], Any]]) -> None:
        """Start the worker, send everything, and return when all of it is through."""
        self._listening.start()
        self.worker.start()
        self.results = {name: send(self.module) for name, send in calls.items()}
        try:
            wait_until(lambda: not self._open(), 120, f"everything is through in {self.worker.name}", interval=0.2)
        except AssertionError as late:
            raise AssertionError(f"{late}\nstill open: {self._open()}\n{self.worker.log_tail()}") from None
        self._told = self.seen()

    def close(self) -> None:
        self._stop.set()
        self._listening.join(10)
        self.results.clear()
        gc.collect()  # while the backend is there for what their last words say to it
        runtime_of(self.app).close()
        self.tasks.close()

    def _listen(self) -> None:
        with self.app.connection_for_read() as connection:
            receiver = self.app.events.Receiver(connection, handlers={"*": self.events.append})
            with receiver.consumer_context() as (listening, _, _):
                while not self._stop.is_set():
                    with contextlib.suppress(TimeoutError):
                        listening.drain_events(timeout=0.2)

    # --- what there is ------------------------------------------------------------------------------------------------

    def seen(self) -> list[dict[str, Any]]:
        """Everything the application's own observers wrote."""
        whole, _, _ = self.tasks.path("seen").read_text().rpartition("\n")  # the last line may be half written
        return [json.loads(line) for line in whole.splitlines()]

    @property
    def idem_events(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"].startswith("idem-")]

    def last_state(self, task_id: str) -> str:
        return str([r["state"] for r in self.seen() if r["kind"] == "postrun" and r["id"] == task_id][-1])

    def bodies(self) -> Iterable[tuple[str, str]]:
        """Short task name and id of every body that ran."""
        return [(r["task"].rpartition(".")[2], r["id"]) for r in self.seen() if r["kind"] == "body" and r["id"]]

    def _open(self) -> list[Any]:
        """Messages that were published and are not through, or whose worker event has not come."""
        seen, events = self.seen(), list(self.events)
        told = {(event["type"], event.get("uuid")) for event in events}
        ended = defaultdict(set)
        for record in seen:
            if record["kind"] == "postrun":
                ended[record["id"], record["retries"]].add(record["state"])
        still = []
        for record in seen:
            if record["kind"] == "publish" and ("task-revoked", record["id"]) not in told:
                states = ended[record["id"], record["retries"]]
                missing = [s for s in states if s in ENDS and (ENDS[s], record["id"]) not in told]
                given_back = states == {"REJECTED"} and record["task"].endswith("giving_back")
                if not states or missing or given_back:
                    still.append((record["task"], record["id"], states))
        return still

    # --- in words two runs have in common -----------------------------------------------------------------------------

    def observed(self, name: str) -> Counter[str]:
        """Everything that was seen of one call: records and their order, worker events, log lines, kept results."""
        ids = {i for i in self._ids_of(self.results[name]) if not self._polls(i)}
        order: dict[Any, list[str]] = defaultdict(list)
        found: list[tuple[str, Any]] = []
        for record in self._told:
            if record["id"] in ids:
                order[record["id"], record["retries"], record["kind"] == "publish"].append(record["kind"])
                found.append(("seen", record))
        found += [("order", kinds) for kinds in order.values()]
        for event in self.events:
            if event.get("uuid") in ids and event["type"].startswith("task-"):
                found.append(("event", {k: v for k, v in event.items() if k != "hostname"}))
        found += [("log", line) for line, _, task_id in LOGGED.findall(self.worker.log) if task_id in ids]
        found += [("kept", self.app.backend.get_task_meta(task_id)) for task_id in ids]
        return Counter(f"{what} {json.dumps(self._plain(facts), sort_keys=True)}" for what, facts in found)

    def _polls(self, task_id: str) -> bool:
        """Whether it is Celery's own look at a chord, which takes as many tries as it takes."""
        return self._labels.get(task_id) == POLLS

    def _ids_of(self, result: Any) -> set[str]:
        ids = set()
        while result is not None:
            ids |= {r.id for r in result} if isinstance(result, GroupResult) else {result.id}
            result = result.parent
        while True:
            more = {r["id"] for r in self._told if r["id"] and ids & {r["root_id"], r["parent_id"]}}
            if more <= ids:
                return ids
            ids |= more

    @cached_property
    def _labels(self) -> dict[str, str]:
        names: dict[str, str] = {}
        for record in self._told:
            if record["kind"] in {"publish", "prerun"} and record["id"]:
                headers = record.get("headers") or {}
                label = f"{record['task']}{headers.get('argsrepr') or record.get('args')}"
                label = POLLS if label.startswith(POLLS) else label  # whose arguments are a whole signature
                names.setdefault(record["id"], UUID.sub("ID", label))
        return names

    def _plain(self, facts: Any) -> Any:
        """The same with ids, times, places and what is ours taken out."""
        if isinstance(facts, Mapping):
            kept = {k: self._plain(v) for k, v in facts.items() if k not in PASSING and not k.startswith(OURS)}
            return {k: v for k, v in kept.items() if v is not None} or None
        if isinstance(facts, (list, tuple)):
            return [self._plain(item) for item in facts]
        if facts is None or isinstance(facts, (int, float, bool)):
            return facts
        return self._said(str(facts))

    def _said(self, text: str) -> str:
        if "Traceback (most recent call last)" in text:
            text = _own_frames(text, str(self.tasks.dir))
        labels = self._labels
        text = UUID.sub(lambda found: f"<{labels.get(found[0], 'ID')}>", text)
        text = re.sub(r"gen\d+@[\w.-]+", "ORIGIN", text)
        text = re.sub(r" in [\d.e-]+s\b", " in SECONDS", re.sub(r"0x[0-9a-f]+", "ADDRESS", TIME.sub("TIME", text)))
        for place, word in {self.tasks.dir: "HERE", self.tasks.name: "APP", self.tasks.queue: "QUEUE"}.items():
            text = text.replace(str(place), word)
        return text.replace(self.worker.name, "WORKER")

    # --- once more ----------------------------------------------------------------------------------------------------

    def send_all_again(self) -> Counter[Any]:
        """Publish every message a second time; how many of each attempt are to run then."""
        copies: Counter[Any] = Counter()
        revoked = {event["uuid"] for event in self.events if event["type"] == "task-revoked"}
        runs = self._runs()
        with self.app.producer_or_acquire() as producer:
            for record in self.seen():
                if record["kind"] == "publish" and record["id"] not in revoked and record["task"] != "mixed.news":
                    where = {"exchange": record["exchange"], "routing_key": record["routing_key"]}
                    options = {**where, **record["properties"], "serializer": "json"}
                    producer.publish(record["body"], headers=record["headers"], **options)
                    copies[record["id"], record["retries"]] += 1
        return runs + copies

    def wait_for(self, runs: Counter[Any]) -> None:
        try:
            wait_until(lambda: not (runs - self._runs()), 60, "every copy was delivered", interval=0.2)
        except AssertionError:
            left = [(self._labels.get(task_id), count) for (task_id, _), count in (runs - self._runs()).items()]
            raise AssertionError(f"never delivered: {left}") from None

    def _runs(self) -> Counter[Any]:
        return Counter((r["id"], r["retries"]) for r in self.seen() if r["kind"] == "postrun")


def _own_frames(text: str, place: str) -> str:
    """A traceback with the application's own frames and the exceptions alone."""
    frames = re.split(r"\n(?=  File )|\n(?=\S)", text)
    return "\n".join(frame for frame in frames if not frame.startswith("  File ") or place in frame)
