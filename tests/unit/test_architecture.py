"""One rule about imports, and one about file length: the shape of the house is part of its contract."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "celery_idem"
FILES = sorted(PACKAGE.rglob("*.py"))
CELERY_SEAMS = {"governed/chain.py", "governed/recovery.py", "governed/telling.py"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_client_library_is_imported_only_where_it_belongs(path: Path) -> None:
    where = path.relative_to(PACKAGE).as_posix()
    names = imported(path)
    if where.split("/")[0] in {"core", "stores", "conformance", "governed"} and where not in CELERY_SEAMS:
        assert "celery" not in names, f"{where} is the mechanism: Celery belongs in a seam beside it"
    assert "redis" not in names or where.startswith("stores/redis/")
    assert "sqlalchemy" not in names or where.startswith(("stores/sql/", "governed/sql/"))
    assert not names & {"pydantic", "cryptography", "httpx"} or where.startswith("governed/")


def test_the_rule_would_notice_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from celery.exceptions import Ignore\n    import redis\n")
    assert imported(wrong) == {"celery", "redis"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_outgrows_a_reader(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500
