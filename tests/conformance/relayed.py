"""Harnesses whose stores reach their server through a relay that loses answers, falls silent or is not there.

One harness serves a whole run of the suite, because connections to PostgreSQL take longer than most cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from celery_idem.conformance import claims
from celery_idem.conformance.case import Case
from celery_idem.conformance.claim_stores import AWAY, TIMEOUT, RedisHarness, SQLHarness, StoreHarness
from celery_idem.stores.base import Store
from tests.support.chaos_proxy import ChaosProxy
from tests.support.operations import answered
from tests.support.processes import LOOPBACK, free_port, wait_until


class Relayed(StoreHarness):
    """What a relay adds to a harness of a store with a server."""

    def __init__(self, url: str) -> None:
        self._second: Store | None = None
        super().__init__(url)
        self.relays: list[ChaosProxy] = []
        self.excused: Mapping[str, str] = {what: why for what, why in self.excused.items() if what not in AWAY}

    def reopen(self) -> Store:
        if not hasattr(self, "store"):
            return super().reopen()
        self._second = self._second or super().reopen()
        return self._second

    def behind(self, timeout: float = TIMEOUT) -> tuple[Store, ChaosProxy]:
        """A handle behind a relay of its own, connected, whose server knows every script."""
        relay = ChaosProxy.before(self.url)
        self.relays.append(relay)
        store = self.open(relay.url(self.url), timeout)
        wait_until(lambda: answered(lambda: store.get("0" * 64)), 20, "an answer through the relay")
        return store, relay

    @contextmanager
    def lost_reply(self) -> Iterator[Store]:
        store, relay = self.behind()
        relay.drop_replies()
        try:
            yield store
        finally:
            relay.heal()

    def silent(self) -> Store:
        store, relay = self.behind(self.timeout)
        relay.blackhole = True
        return store

    def unreachable(self) -> Store:
        parts = urlsplit(self.url)
        user, at, _ = parts.netloc.rpartition("@")
        return self.open(urlunsplit(parts._replace(netloc=f"{user}{at}{LOOPBACK}:{free_port()}")), self.timeout)

    def close(self) -> None:
        """Later: see ``run``."""

    def end(self) -> None:
        """Close everything."""
        for relay in self.relays:
            relay.close()
        super().close()


class RelayedRedis(Relayed, RedisHarness):
    """Redis."""


class RelayedSQL(Relayed, SQLHarness):
    """PostgreSQL."""

    def end(self) -> None:
        super().end()
        self._database.close()


def run(url: str, rules: tuple[str, ...] = claims.RULES) -> list[claims.CaseResult]:
    """What the suite says of the store that this URL of a server names."""
    kind: Any = RelayedRedis if url.startswith("redis") else RelayedSQL
    harness = kind(url)
    try:
        return claims.run(lambda: harness, rules)
    finally:
        harness.end()


def in_order(*needs: str) -> list[str]:
    """The names of the cases that need one of these, in the order of their rules."""
    chosen: list[Case] = [case for rule in claims.RULES for case in claims.CASES if case.rule == rule]
    return [case.name for case in chosen if set(needs) & set(case.needs)]
