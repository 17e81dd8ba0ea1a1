"""The search at small sizes, and that it notices: ``make model`` goes on from here, and asks spin too."""

from __future__ import annotations

import pytest

from tests.model.rules import REVERTED, Rec, Verbs, read, spelled
from tests.model.search import explore
from tests.model.worlds import LARGER, SHORTEST, WORLDS, world

SMALL = ("a value, the dead wait for their lease", "a failure", "an exit")
SOON = [
    rules for rules in REVERTED if SHORTEST[rules.name] != "a body that never ends" and "NOT_DUE for" not in rules.name
]


@pytest.mark.parametrize("name", SMALL)
def test_no_order_of_events_breaks_a_promise(name: str) -> None:
    found = explore(world(name))
    assert found.violations == {}
    assert not found.truncated
    assert found.states > 300
    assert found.quiet >= 1


@pytest.mark.parametrize("rules", SOON, ids=[rules.name.replace(" ", "-") for rules in SOON])
def test_a_rule_taken_out_is_noticed(rules: object) -> None:
    found = explore(world(SHORTEST[rules.name], rules), enough=True)  # type: ignore[attr-defined,arg-type]
    assert len(found.violations) == 1
    (way,) = found.violations.values()
    assert way


def test_every_rule_has_its_world() -> None:
    assert set(SHORTEST) == {rules.name for rules in REVERTED}
    assert set(SHORTEST.values()) <= {*WORLDS, *LARGER}


def test_a_record_of_small_numbers_is_the_real_one() -> None:
    """What a verb wrote, spelled out again, is what the next one reads."""
    from celery_idem.core.records import Answer, Release

    verbs = Verbs(world("a retry").rules, 1)
    first = Rec(notes=(world("a retry").first().rec.notes[0],))
    answer, right, claimed = verbs.claim(first, (0, 0, 1))
    assert (answer, right, claimed.state, claimed.token) == (Answer.ACQUIRED, False, "CLAIMED", 1)
    released = verbs.release(claimed, (0, 0, 1), Release.RETRY)
    assert (released.state, released.notes[0].successor) == ("RELEASED", 1)
    assert verbs.claim(released, (0, 0, 2))[0] is Answer.NOT_DUE
    record = spelled(released)
    assert record is not None
    assert read(record, 1, (-1, -1)) == released
