"""The page of evidence: a proof writes its own section and the table of verdicts, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns import evidence

PAGE = """# Evidence

<!-- verdicts -->
<!-- verdicts: end -->

<!-- chaos: written by make chaos -->
<!-- chaos: end -->

Words of ours.

<!-- bench: written by make bench -->

Not run yet.

<!-- bench: end -->
"""


def rows(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text().splitlines() if line.startswith("| [")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    ("broken", "unjudged", "verdict"),
    [
        ([], "", "every promise held"),
        (["too slow", "behind"], "", "2 missed, named there"),
        ([], "load 9", "Not judged: load 9."),
    ],
)
def test_a_section_and_its_verdict(
    broken: list[str], unjudged: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "evidence.md"
    page.write_text(PAGE)
    monkeypatch.setenv("EVIDENCE_FILE", str(page))
    evidence.conclude("chaos", "Chaos", "| a table |", broken, unjudged=unjudged)
    chaos, bench = rows(page)
    assert chaos[:2] == ["[chaos](#chaos-on-real-servers)", verdict]
    assert bench == ["[bench](#speed)", "not run yet", "", ""]
    assert "Words of ours." in page.read_text()
    assert "| a table |" in page.read_text()
    evidence.conclude("bench", "Bench", "other", [])
    assert rows(page)[0] == chaos, "it stays as it was"
    assert rows(page)[1][1] == "every promise held"


def test_every_proof_has_its_place_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "evidence.md").read_text()
    assert {name for name, _ in evidence._SECTION.findall(page)} == set(evidence.ANCHORS)
