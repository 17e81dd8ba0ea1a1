"""The proof is alive: a mutant is put in its place and judged by tests, and what was judged equivalent still exists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.judged import PAGE, judgement, read
from tests.mutants.mutant import Mutant
from tests.mutants.report import Report, conclude
from tests.mutants.running import ROOT, Fate, Laboratory, copy_to
from tests.mutants.targets import TARGETS

FILE = "celery_idem/core/decide.py"
LINE = "return ttl if ttl > 0 else DAY"
NOTICED = "return ttl if ttl < 0 else DAY"
TESTS = ("tests/unit/test_decide.py", "-k", "fence or ttl")


def _mutant(after: str) -> Mutant:
    source = (ROOT / FILE).read_text()
    assert source.count(LINE) == 1
    return Mutant(FILE, "ByHand", 1, 1, "kept", LINE, after, source.replace(LINE, after))


def test_a_mutant_is_killed_survives_or_is_ended_and_leaves_the_tree_as_it_was(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    copy_to(tree)
    place = Laboratory(tree, {})
    try:
        assert place.fate(_mutant(LINE), TESTS, 90) is Fate.SURVIVED, place.output.read_text()
        assert place.fate(_mutant(NOTICED), TESTS, 90) is Fate.KILLED
        hanging = replace(_mutant(LINE), code="while True:\n    pass\n")
        assert place.fate(hanging, TESTS, 1) is Fate.TIMED_OUT
        assert (tree / FILE).read_text() == (ROOT / FILE).read_text()
        assert (ROOT / FILE).read_text().count(LINE) == 1
    finally:
        place.close()


def test_what_was_judged_still_stands_in_its_file() -> None:
    judged = read(PAGE.read_text())
    for file, function, operator, before, _ in judged:
        for line in before.split("; "):
            assert line in (ROOT / file).read_text(), f"{file} in {function}, {operator}: judge it anew"
    assert {file for file, *_ in judged} <= {target.file for target in TARGETS}


def test_a_judged_mutant_is_known_again_wherever_its_line_moves() -> None:
    mutant = _mutant(NOTICED)
    judged = read(f"{FILE} in kept, ByHand:\n    - {LINE}\n    + {NOTICED}\n    = no reason\n")
    assert judgement(replace(mutant, line=99), judged) == "no reason"
    assert judgement(replace(mutant, after=LINE), judged) is None
    with pytest.raises(ValueError, match="not a judged mutant"):
        read(f"{FILE} in kept, ByHand:\n    - {LINE}\n    + {NOTICED}\n")


def test_every_file_and_every_test_file_exists() -> None:
    for target in TARGETS:
        assert (ROOT / target.file).is_file()
        assert all((ROOT / word).is_file() for word in target.tests if word.endswith(".py"))


def test_the_sums_are_evidence_and_the_rest_is_on_a_page_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums, listed = tmp_path / "evidence.md", tmp_path / "mutants.md"
    for page in (sums, listed):
        page.write_text("<!-- mutants: written by make mutants -->\n<!-- mutants: end -->\n")
    monkeypatch.setenv("EVIDENCE_FILE", str(sums))
    mutant = _mutant(NOTICED)
    judged = {mutant.name: "no reason"}
    report = Report(TARGETS[0], made=5)
    report.add(mutant, Fate.SURVIVED, judged)
    report.add(_mutant(LINE), Fate.KILLED, judged)
    assert conclude([report], judged, whole=True, seed=1, kept=False) == 0
    assert "| 1 | 5 | 2 | 1 | 0 | 1 | 1 | 0 |" in sums.read_text()
    assert "Every promise held." in sums.read_text()
    assert f"| {TARGETS[0].file} | 5 | 2 | 1 | 0 | 1 | 1 | 0 |" in listed.read_text()
    assert "= no reason" in listed.read_text()
    assert TARGETS[0].file not in sums.read_text()
