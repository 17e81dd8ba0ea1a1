"""The suite for claim stores: ours pass, and a store that breaks one rule is caught by its cases alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from celery_idem.conformance import claims
from celery_idem.conformance.claim_cases import bench
from celery_idem.conformance.claim_stores import ALONE, MemoryHarness, harnesses
from celery_idem.stores.base import open_store
from celery_idem.stores.memory import MemoryStore
from tests.conformance import plain_claims
from tests.conformance.broken_claims import BROKEN, check
from tests.conformance.broken_claims_base import BedHarness
from tests.conformance.relayed import in_order, run
from tests.support.operations import op


def shown(results: list[claims.CaseResult]) -> str:
    return "\n".join(line[:2000] for line in claims.SUITE.table(results))


def not_passed(results: list[claims.CaseResult]) -> list[str]:
    return [result.name for result in results if result.outcome != claims.PASSED]


def command(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-W", "error", "-m", module, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=150, cwd=Path(__file__).parents[2])


class ItsOwnClock(MemoryHarness):
    """A store that goes by the time of day."""

    def __init__(self) -> None:
        super().__init__(lambda clock: MemoryStore())
        self.clock = None


class TestStoresThatConform:
    def test_memory_keeps_every_rule_that_a_process_can_break(self) -> None:
        results = claims.run(MemoryHarness)
        assert all(result.ok for result in results), shown(results)
        assert not_passed(results) == in_order(*MemoryHarness.excused)

    def test_a_store_whose_clock_nobody_moves_is_held_to_what_can_be_waited_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bench, "REAL_LEASE", 0.3)
        results = claims.run(ItsOwnClock)
        assert [result.name for result in results if result.outcome == claims.FAILED] == [], shown(results)
        assert not_passed(results) == in_order("clock", *MemoryHarness.excused)
        assert {result.told for result in results if not result.ok} == {
            "the harness has no clock hook: add one, or say in excused why there can be none"
        }

    @pytest.mark.redis
    def test_redis_keeps_every_rule_but_those_about_locks(self, redis_url: str) -> None:
        results = run(redis_url)
        assert all(result.ok for result in results), shown(results)
        assert not_passed(results) == in_order("locked")

    @pytest.mark.postgres
    def test_postgresql_keeps_every_rule(self, postgres_url: str) -> None:
        results = run(postgres_url)
        assert not_passed(results) == [], shown(results)

    @pytest.mark.postgres
    def test_postgresql_keeps_the_rules_about_trouble_through_its_other_driver(self, postgres_url: str) -> None:
        results = run(re.sub(r"^postgresql\+\w+", "postgresql+psycopg", postgres_url), ("S1", "S3", "S6", "S7", "S8"))
        assert not_passed(results) == [], shown(results)

    def test_sqlite_keeps_them_and_the_command_says_so(self, tmp_path: Path) -> None:
        done = command("celery_idem.conformance.claims", f"sqlite:///{tmp_path / 'claims.db'}")
        assert done.returncode == 0, done.stdout
        assert done.stderr == ""
        cases, without = len(claims.CASES), len(in_order("locked", *ALONE))
        counted = f"{cases} cases of {len(claims.RULES)} rules: {cases - without} passed, 0 failed, {without} not run"
        assert done.stdout.splitlines()[-1] == counted

    def test_the_suite_needs_neither_celery_nor_pytest_nor_a_database_library(self) -> None:
        script = (
            "import sys, celery_idem.conformance.claims, celery_idem.conformance.claim_stores;"
            "print([name for name in ('celery', 'pytest', 'redis', 'sqlalchemy') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "[]", done.stderr

    def test_a_store_that_was_written_from_the_contract_alone_conforms_too(self) -> None:
        assert "import decide" not in Path(plain_claims.__file__).read_text()
        claims.assert_conforms(plain_claims.PlainClaimsHarness)


class TestBrokenStores:
    """``python -m tests.conformance`` holds every one against all cases; here each meets those that it names."""

    @pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
    def test_it_is_caught_by_the_cases_it_names(self, broken: Any) -> None:
        named = [case for case in claims.CASES if case.name in broken.caught_by]
        results = check(broken, named)
        assert {result.name for result in results if result.outcome == claims.FAILED} == broken.caught_by, shown(
            results
        )

    def test_the_sound_one_they_are_made_of_is_not_caught(self) -> None:
        results = claims.run(BedHarness)
        assert not_passed(results) == in_order("shared"), shown(results)

    def test_every_case_has_caught_one(self) -> None:
        assert {name for broken in BROKEN for name in broken.caught_by} == {case.name for case in claims.CASES}
        assert all(len({name.partition(".")[0] for name in broken.caught_by}) == 1 for broken in BROKEN)
        rules_and_cases = {*claims.RULES, *(case.name for case in claims.CASES)}
        assert {name for broken in BROKEN for name in broken.also} <= rules_and_cases


class TestTheCommand:
    def test_one_command_runs_the_suites_that_fit(self) -> None:
        done = command("celery_idem.conformance", "memory://")
        assert done.returncode == 0, done.stdout
        assert f"{len(claims.CASES)} cases" in done.stdout
        assert "invariants" not in done.stdout

    @pytest.mark.parametrize("module", ["celery_idem.conformance", "celery_idem.conformance.claims"])
    def test_it_says_how_it_is_used(self, module: str) -> None:
        done = command(module, "claims.db")
        assert done.returncode == 2
        assert done.stderr.startswith(f"usage: python -m {module} URL")

    def test_it_leaves_a_place_with_claims_alone(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'claims.db'}"
        store = open_store(url)
        store.create_schema()

        store.claim(op(), lease=60, ttl=60)
        done = command("celery_idem.conformance", url)
        assert done.returncode == 2
        assert "give it an empty place" in done.stderr
        assert len(list(store.find())) == 1
        store.close()

    def test_it_knows_its_own_records_and_says_that_the_place_must_be_emptied(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'claims.db'}"
        claims.run(harnesses(url), ["S4", "S5"])
        done = command("celery_idem.conformance.claims", url)
        assert done.returncode == 2
        assert done.stderr == "an earlier run left its records here: empty the place, or name another one\n"

    @pytest.mark.parametrize("url", ["mysql://u:secret@localhost/d", "sqlite:///no/such/directory/a.db"])
    def test_it_says_in_one_line_what_is_wrong_with_a_url(self, url: str) -> None:
        done = command("celery_idem.conformance.claims", url)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert "secret" not in done.stderr


class TestTheCases:
    def test_every_case_says_which_store_it_catches(self) -> None:
        assert all(case.catches.startswith("A store ") for case in claims.CASES)
        assert [rule for rule in claims.RULES if rule not in {case.rule for case in claims.CASES}] == []
        assert {case.rule for case in claims.CASES} == set(claims.RULES)
        names = [case.name for case in claims.CASES]
        assert len(names) == len(set(names))

    def test_a_breach_tells_what_was_wanted(self) -> None:
        (store,) = [broken for broken in BROKEN if broken.__name__ == "TakesInTwoSteps"]
        (told,) = [result.told for result in check(store, [c for c in claims.CASES if c.name in store.caught_by])]
        assert told.startswith("12 claims of a new key at once were answered")
        assert told.endswith("; wanted: {'ACQUIRED': 1, 'HELD': 11}")
