"""Governed actions killed by SIGKILL at places of their own code path: one mutation or none, and an end in plain sight.

``python -m tests.campaigns.governed_kills`` is the same at every line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.campaigns.governed_house import house
from tests.campaigns.governed_kills import Fate, Figures, Site, killed
from tests.campaigns.governed_points import STEPS, WORKER, Place
from tests.campaigns.kills import sqlite_file

pytestmark = [pytest.mark.crash, pytest.mark.redis, pytest.mark.postgres]
CONSUMED = Place("dispatch", 0, "begin_owner_authorized_dispatch", "sql", "after COMMIT")
SENT = Place("dispatch", 0, "PUT", "http", "http11.send_request_body.complete")
ANSWERED = Place("dispatch", 0, "PUT", "http", "http11.receive_response_body.complete")
Sites = Callable[[str], Site]


@pytest.fixture
def sites(request: Any) -> Iterator[Sites]:
    """Makes a site on a store, with a house of its own."""
    redis, made = request.getfixturevalue("redis_server"), list[Site]()

    def make(store: str) -> Site:
        made.append(Site(store, redis, url))
        return made[-1]

    with house() as url:
        yield make
        for site in made:
            site.close()


def fates(site: Site, places: list[Place], **how: Any) -> dict[Place, Fate]:
    """What became of an action killed at each of the places, once no promise was broken."""
    figures = Figures("governed", places, killed(site, places, **how), site.stuck())
    assert figures.broken() == []
    return {fate.place: fate for fate in figures.fates if fate.struck}


def test_a_child_killed_anywhere_in_a_life_mutates_once_or_not_at_all(sites: Sites, postgres_url: str) -> None:
    site = sites(postgres_url)
    path = site.watched("pay")
    assert [step for step in STEPS if any(place.step == step for place in path)] == [*STEPS]
    assert {CONSUMED, SENT, ANSWERED} <= {*path}
    lines = [place for place in path if place.kind == "line"]
    assert len(lines) > 1000, "it runs through more of the library than this"
    exchange = [place for place in path if (place.call, place.kind) == ("PUT", "http")]
    written = [
        p for p in path if p.kind == "sql" and p.what.startswith(("before INSERT", "before UPDATE", "before COM"))
    ]
    written = [p for p in written if p.call in {"begin_owner_authorized_dispatch", "accept"}]
    found = fates(site, [*exchange, CONSUMED, *written, *lines[:: len(lines) // 12]])
    assert {found[place].state for place in exchange} == {"completed", "ambiguous"}
    assert (found[CONSUMED].state, found[CONSUMED].account.puts) == ("ambiguous", 0)
    assert (found[SENT].state, found[SENT].account.puts) == ("completed", 1)


def test_a_child_killed_in_its_mutation_on_a_ledger_in_a_file(sites: Sites) -> None:
    with sqlite_file() as url:
        found = fates(sites(url.replace("store.db", "actions.db")), [CONSUMED, SENT, ANSWERED])
    assert [found[place].state for place in (CONSUMED, SENT, ANSWERED)] == ["ambiguous", "completed", "completed"]


def test_a_child_killed_while_it_looks_for_a_lost_answer(sites: Sites, postgres_url: str) -> None:
    journalled = Place("observe", 0, "begin_dispatched_observation", "sql", "after COMMIT")
    in_vain = Place("observe", 0, "defer_dispatched_observation", "sql", "before COMMIT")
    seen = Place("observe", 1, "GET", "http", "http11.receive_response_body.complete")
    accepted = Place("observe", 1, "accept", "sql", "after COMMIT")
    found = fates(sites(postgres_url), [journalled, in_vain, seen, accepted], way="late")
    assert {fate.state for fate in found.values()} == {"completed"}


def test_a_whole_worker_killed_before_and_after_the_request_was_sent(sites: Sites, postgres_url: str) -> None:
    found = fates(sites(postgres_url), [CONSUMED, SENT], who=WORKER)
    assert (found[CONSUMED].state, found[CONSUMED].account.puts) == ("ambiguous", 0)
    assert (found[SENT].state, found[SENT].account.puts) == ("completed", 1)
