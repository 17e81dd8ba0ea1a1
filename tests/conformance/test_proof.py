"""``make conformance`` in small: what it counts of a few broken stores, and what it calls broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from celery_idem.conformance import claims
from tests.conformance import __main__ as proof
from tests.conformance.broken_claims import BROKEN, check
from tests.conformance.broken_claims_base import Bed

CHOSEN = [broken for broken in BROKEN if broken.__name__ in {"CompletesOnce", "TheLastValueStays", "EverybodyWaits"}]
ITS_RULES = {"complete", "S6", "R8", "table"}


def of_its_rules(store: Any) -> list[claims.CaseResult]:
    return check(store, [case for case in claims.CASES if case.rule in ITS_RULES and "silent" not in case.needs])


class Sound(Bed):
    """Nothing is wrong with it."""

    caught_by = frozenset({"complete.a_completion_makes_the_record_whole"})


def faults(stores: Sequence[Any]) -> list[str]:
    found = proof.faults(claims.SUITE, proof.held("claims", stores, of_its_rules))
    return [line for line in found if "has no broken store" not in line]


def test_it_counts_who_was_caught_by_what() -> None:
    held = proof.held("claims", CHOSEN, of_its_rules)
    rows = {row[0]: row[1:] for row in proof.rows(claims.SUITE, held, histories=True)}
    # CompletesOnce fails the case of a lost reply too, and the histories do not come upon EverybodyWaits.
    assert rows["complete"] == (5, 2, 2, 1, 2)
    assert rows["R8"] == (4, 1, 1, 1, 0)
    assert rows["all"] == (len(claims.CASES), 3, 3, 2, 2)
    assert faults(CHOSEN) == []
    assert "S6.a_completion_whose_reply_was_lost_may_be_repeated" in proof.rests(held)


def test_a_store_that_is_not_caught_is_a_broken_promise() -> None:
    assert faults([Sound]) == ["Sound was not caught by ['complete.a_completion_makes_the_record_whole']"]


def test_so_is_one_that_is_caught_by_what_it_does_not_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    (store,) = [broken for broken in CHOSEN if broken.__name__ == "CompletesOnce"]
    monkeypatch.setattr(store, "also", frozenset())
    case = "S6.a_completion_whose_reply_was_lost_may_be_repeated"
    assert faults([store]) == [f"CompletesOnce was also caught by ['{case}']"]


def test_and_a_case_that_catches_nothing() -> None:
    found = proof.faults(claims.SUITE, [])
    assert found == [f"{case.name} has no broken store" for case in claims.CASES]


def test_it_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        proof.main(["--help"])
    assert "claims|actions" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["stores"], ["--store", "Nobody"]], ids=["suite", "store"])
def test_what_is_not_there_is_not_run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        proof.main(argv)
    assert f"of this name: {argv[-1]}" in capsys.readouterr().err


def test_one_store_is_held_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(proof.broken_claims, "check", of_its_rules)
    monkeypatch.delenv("EVIDENCE_FILE", raising=False)
    assert proof.main(["claims", "--store", "TheLastValueStays"]) == 0
    said = capsys.readouterr().out
    assert "| complete | 5 | 1 | 1 | 1 | 1 |" in said
    assert "Action stores" not in said
