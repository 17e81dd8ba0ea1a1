"""Message headers as a remote publisher could send them, through Celery's own tracer and the whole library.

Whatever our headers say, the message is run, replayed, failed with an error of ours, or parked; it is never dropped,
its body runs once per key, and a clean copy of it that comes later finds everything in order.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from hypothesis import strategies as st

from celery_idem import Policy, publish
from celery_idem.app import runtime_of
from celery_idem.errors import CeleryIdemError
from celery_idem.publish import KEY_HEADER, PARK_HEADER, REPLACED_HEADER, STAMP_HEADER, moment, read_parked
from celery_idem.testing.message import Delivered, Message
from tests.fuzz.target import Draw, Target
from tests.fuzz.values import json_like, on_the_wire
from tests.support.delivery import Shop

TASKS: dict[str, Policy] = {
    "by_message": Policy(),
    "by_arguments": Policy(key="arguments"),
    "by_template": Policy(key="order:{order}", fingerprint=["amount"]),
}
STARTS = ("fresh", "completed", "held")
counts = (
    st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**63, 1e308, 0.5, True, "1", "٣", "1e3", "", None, [], {}]) | json_like
)
times = st.sampled_from(
    ["2026-01-01T00:00:00+00:00", "9999-12-31T23:59:59-23:59", "0001-01-01", "x", 1e9, None, [], ""]
)


class House:
    """An app with a task of each kind, and how often each order's body ran."""

    def __init__(self) -> None:
        self.shop = Shop()
        self.runs: Counter[str] = Counter()
        self.orders = map("order-{}".format, itertools.count(1))
        self.tasks = {name: self._task(name, policy) for name, policy in TASKS.items()}

    def _task(self, name: str, policy: Policy) -> Any:
        @self.shop.task(name=name, idempotency=policy)
        def body(order: str, amount: int = 1) -> dict[str, Any]:
            self.runs[order] += 1
            return {"paid": order, "run": self.runs[order]}

        return body

    def hold(self, task: Any, message: Message) -> None:
        """Somebody on a machine that is gone has claimed the message's key."""
        runtime, facts = runtime_of(self.shop.app), dict(message)
        policy = runtime.policy_of(task)
        request = type("Request", (), {"retries": 0, "replaced_task_nesting": 0, **facts, "headers": facts})
        stamp = publish.stamp_of(task, policy, request, message["args"], message["kwargs"])
        operation = publish.operation_of(task, policy, runtime, request, stamp, continues=False)
        assert self.shop.store.claim(operation, lease=60, ttl=600).claim is not None


@contextmanager
def a_house(_: Callable[[], str]) -> Iterator[House]:
    """A shop with its tasks."""
    house = House()
    yield house
    house.shop.close()


# --- what is sent ----------------------------------------------------------------------------------------------------


def _stamp(draw: Draw, message: Message) -> Any:
    facts = json.loads(message[STAMP_HEADER])
    for name in draw(st.lists(st.sampled_from(["v", "task", "id", "key", "fp", "more"]), max_size=2)):
        facts[name] = draw(json_like | st.sampled_from(["f" * 64, "F" * 64, "by_message", message.id]))
    text = json.dumps(facts)
    return draw(st.sampled_from([text, text.encode(), facts, [text], text[:-1], text * 2]))


def _park(draw: Draw) -> Any:
    facts = {"generation": draw(counts), "count": draw(counts), "expires": draw(times)}
    for name in draw(st.sets(st.sampled_from(sorted(facts)), max_size=1)):
        del facts[name]
    return draw(st.sampled_from([json.dumps(facts), facts]))


def _garbled(draw: Draw, message: Message) -> Message:
    """A copy of the message whose headers are garbage, or nearly right."""
    spoiled = message.copy()
    for name in draw(st.sets(st.sampled_from([KEY_HEADER, STAMP_HEADER, PARK_HEADER, REPLACED_HEADER]), min_size=1)):
        if name == STAMP_HEADER and draw(st.booleans()):
            spoiled[name] = _stamp(draw, message)
        elif name == PARK_HEADER and draw(st.booleans()):
            spoiled[name] = _park(draw)
        elif draw(st.integers(0, 4)) == 0:
            spoiled.pop(name, None)
        else:
            spoiled[name] = draw(on_the_wire)
    if draw(st.integers(0, 4)) == 0:
        spoiled[draw(st.sampled_from(["retries", "replaced_task_nesting"]))] = draw(counts)
    return spoiled


# --- what may come of it ---------------------------------------------------------------------------------------------


def _key(delivered: Delivered) -> str | None:
    return next((str(event.fields["key"]) for event in delivered.events if event.fields.get("key")), None)


def _judge(delivered: Delivered, order: str) -> str:
    """What came of a delivery, in a word; anything but these is a fault."""
    if delivered.state == "SUCCESS":
        assert delivered.value["paid"] == order, delivered.value
        return "replayed" if delivered.event == "REPLAYED" else "run"
    if delivered.state == "FAILURE":
        assert isinstance(delivered.value, CeleryIdemError), repr(delivered.value)
        assert str(delivered.value)
        return f"failed: {type(delivered.value).__name__}"
    if delivered.state == "IGNORED" and delivered.info is not None and "expired" in str(delivered.value):
        assert moment(read_parked(delivered.message).expires) < datetime.now(timezone.utc)
        return "expired"
    if delivered.state == "IGNORED":
        copies = [copy for copy in delivered.published if copy.id == delivered.message.id]
        assert len(copies) == 1, f"{delivered} was dropped"
        assert read_parked(copies[0]).count >= 1
        assert copies[0]["args"] == delivered.message["args"]
        return "parked"
    raise AssertionError(f"{delivered} ended {delivered.state}")


def play(draw: Draw, house: House) -> str:
    """A message whose headers are garbage comes to a fresh, a completed or a held key."""
    shop, order = house.shop, next(house.orders)
    shop.events.clear()
    task = house.tasks[draw(st.sampled_from(sorted(TASKS)))]
    message = shop.send(task, order)
    start = draw(st.sampled_from(STARTS))
    deliveries = [shop.deliver(message)] if start == "completed" else []
    if start == "held":
        house.hold(task, message)
    delivered = shop.deliver(_garbled(draw, message))
    came = _judge(delivered, order)
    deliveries += [delivered, *shop.idem.run_all()]
    ended = _judge(deliveries[-1], order) if came == "parked" else came
    assert came != "parked" or ended in {"run", "replayed", "expired"}, f"a parked copy came to nothing: {ended}"
    if ended != "expired" and not delivered.message.get("retries"):  # after a later attempt an earlier one is over
        clean = [shop.deliver(message), *shop.idem.run_all()]
        assert _judge(clean[-1], order) in {"run", "replayed"}, "a clean copy came to nothing"
        deliveries += clean
    keys = {_key(each) for each in deliveries} - {None}
    assert house.runs[order] <= max(1, len(keys)), f"{house.runs[order]} runs under {len(keys)} keys"
    return f"{start}: {came}"


def play_replay(draw: Draw, house: House) -> str:
    """The stored result is garbled before a copy comes: it gets that result or an error of ours, and nothing runs."""
    shop, order = house.shop, next(house.orders)
    shop.events.clear()
    message = shop.send(house.tasks["by_arguments"], order)
    first = shop.deliver(message)
    records = shop.store._records
    record = records[first.key]
    encoded = record.outcome.encoded
    name = draw(st.sampled_from(["body", "content_type", "content_encoding", "checksum"]))
    old = getattr(encoded, name)
    value = draw(st.just(old) | (st.binary(max_size=4) if name == "body" else st.text(max_size=3)))
    kept = replace(encoded, **{name: value}) if draw(st.integers(0, 4)) else None
    records[first.key] = replace(record, outcome=replace(record.outcome, encoded=kept))
    again = shop.deliver(message)
    assert house.runs[order] == 1
    came = _judge(again, order)
    assert came != "replayed" or (again.value == first.value and (kept == encoded or kept is None)), again.value
    return came


TARGETS = [
    Target(
        "replay",
        "a copy gets the stored result or an error of ours, however the record was garbled",
        play_replay,
        a_house,
    ),
    Target(
        "headers",
        "run once per key, replayed, parked, expired or failed with an error of ours; never dropped",
        play,
        a_house,
    ),
]
