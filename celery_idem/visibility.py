"""Keep the messages a live worker holds from being given to another worker: on Redis alone.

Redis does not know who holds a message. kombu notes when each one was delivered, and any worker gives away what was
delivered longer ago than ``visibility_timeout``, also where its holder is alive: busy with a long body, waiting for an
ETA, or behind a full prefetch. So every third of that time a thread of the worker notes the present moment for all it
holds, of whatever task. Where nobody does that any more, because the worker is dead or frozen, the messages still come
back.

It never brings back what is gone: a message that was acked or given away has no note left to move.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery import bootsteps

from celery_idem.app import runtime_of
from celery_idem.core.forking import background_gate
from celery_idem.core.threads import Bell, start_thread, way_back

logger = logging.getLogger("celery_idem")

CHUNK = 1000
"""Messages per command: each keeps Redis busy for 1 to 3 milliseconds."""
AT_LEAST = 0.05
"""Seconds between two rounds: a timeout of nothing must not make a loop without a pause."""
RETRY_AFTER = 5.0
"""Seconds between two tries while the broker does not answer, or less where a third of the timeout is less."""
ANSWER_WITHIN = 10.0
"""Seconds one command may take at most."""


class KeepVisible(bootsteps.StartStopStep):
    """Consumer step: refresh what this connection holds, from the first message until the last is given back."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._keeper: Keeper | None = None

    def start(self, parent: Any) -> None:
        """Begin with a new connection, if it is one to Redis and the settings agree; forget the one before."""
        self.shutdown(parent)
        runtime = runtime_of(parent.app)
        if runtime.mode == "off" or not runtime.settings["keep_visible"]:
            return
        channel = parent.task_consumer.channel
        if parent.connection.transport.driver_type == "redis" and channel.ack_emulation:
            self._keeper = Keeper(parent.connection, float(channel.visibility_timeout))
            self._keeper.start()

    def stop(self, parent: Any) -> None:  # noqa: ARG002  Celery's signature
        """No more tasks begin: from now on keep only what runs, for as long as it takes to end."""
        if self._keeper is not None:
            self._keeper.draining = True

    def shutdown(self, parent: Any) -> None:  # noqa: ARG002  Celery's signature
        """End it: the step before this one gives back what is left."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.stop()


class Keeper:
    """A thread with a Redis connection of its own that refreshes the messages another connection holds."""

    def __init__(self, connection: Any, visibility_timeout: float) -> None:
        self.every = max(visibility_timeout / 3, AT_LEAST)
        self.draining = False
        """Whether messages that wait in this worker may go to others: it will not run them any more."""
        self._holding = connection.transport
        within = max(1.0, min(self.every, ANSWER_WITHIN))
        limits = {"socket_timeout": within, "socket_connect_timeout": within}
        self._end_within = 2 * within
        self._like = connection.clone(transport_options={**limits, **connection.transport_options})
        self._own: Any = None
        self._channel: Any = None
        self._stopping, self._bell, self._ended = False, Bell(), Bell()
        self._over = False
        self._join: Callable[[], object] | None = None
        self._back = way_back()

    def start(self) -> None:
        """Start the thread."""
        self._join = start_thread(self._run, "celery_idem visibility")

    def stop(self) -> None:
        """End the thread, and wait for it no longer than its connection may take to answer."""
        self._stopping = True
        self._bell.ring()
        self._ended.wait(self._end_within)
        if self._over and self._join is not None:
            self._join()  # under gevent it still takes its hub down, and a process that ends beside that crashes

    def _run(self) -> None:
        pause, failing = self.every, False
        try:
            while True:
                self._bell.wait(pause)
                if self._stopping:
                    return
                failed = self._tried()
                if failed and not failing:
                    self._say(logging.WARNING, f"held messages are not kept from other workers now: {failed!r}")
                elif failing and not failed:
                    self._say(logging.INFO, "held messages are kept from other workers again")
                failing = failed is not None
                pause = min(self.every, RETRY_AFTER) if failing else self.every
        finally:
            self._close()
            self._over = True
            self._ended.ring()

    def _tried(self) -> Exception | None:
        try:
            with background_gate:
                self.refresh()
        except Exception as error:  # noqa: BLE001  whatever it is, the worker goes on
            self._close()
            return error
        return None

    def _say(self, level: int, text: str) -> None:
        self._back(lambda: logger.log(level, "celery_idem: %s", text))

    def refresh(self) -> int:
        """Note the present moment for every message held, in one round trip; how many that were."""
        tags = self.held()
        if tags:
            channel = self._channel or self._open()
            index, now = channel.unacked_index_key, time.time()  # kombu's own clock
            pipe = channel.client.pipeline(transaction=False)
            for first in range(0, len(tags), CHUNK):
                pipe.zadd(index, dict.fromkeys(tags[first : first + CHUNK], now), xx=True)
            pipe.execute()
        return len(tags)

    def held(self) -> list[str]:
        """Delivery tags of the messages this worker still has to ack."""
        tags: set[str] = set()
        for channel in list(self._holding.channels):
            qos = channel._qos  # noqa: SLF001  kombu has no other way to ask, and the property makes one
            if qos is not None:
                # Tags are never drawn anew, so one that is acked here may be what another worker holds by now. And each
                # copy is a single step in C: the consumer's thread goes on changing both.
                acked = qos._dirty.copy()  # noqa: SLF001
                tags.update(tag for tag in dict.copy(qos._delivered) if tag not in acked)  # noqa: SLF001
        return list(tags & running() if self.draining else tags)

    def _open(self) -> Any:
        # Not through the connection itself: that tries other hosts, where none of these messages are.
        self._own = transport = self._like.create_transport()
        self._channel = transport.create_channel(transport)
        return self._channel

    def _close(self) -> None:
        own, self._own, self._channel = self._own, None, None
        if own is not None:
            with suppress(Exception):
                own.close_connection(own)


def running() -> set[str]:
    """Delivery tags of the messages whose bodies run in this worker's pool."""
    from celery.worker.state import active_requests

    while True:
        try:
            return {request.message.delivery_tag for request in active_requests}
        except RuntimeError:  # it changed meanwhile
            continue
