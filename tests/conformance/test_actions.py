"""The suite for action stores: ours pass, and a store that breaks one invariant is caught by its cases alone.

Every broken store is held against the cases it names here, and one of each invariant against all of them;
``python -m tests.conformance.broken_actions`` holds every one against all, and prints who was caught by what.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from celery_idem.conformance import actions
from celery_idem.conformance.actions import CASES
from celery_idem.conformance.sql import SQLHarness
from celery_idem.errors import ConfigurationError
from celery_idem.governed.sql.store import SQLActionStore
from tests.conformance.broken_actions import BROKEN, BrokenStore, check, invariant_of
from tests.conformance.plain_store import PlainHarness

FIRST_OF_EACH = list({invariant_of(broken): broken for broken in reversed(BROKEN)}.values())


def shown(results: list[actions.CaseResult]) -> str:
    return "\n".join(actions.SUITE.table(results))


def failed(results: list[actions.CaseResult]) -> set[str]:
    return {result.name for result in results if not result.ok}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-W", "error", "-m", "celery_idem.conformance.actions", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])


class TestStoresThatConform:
    @pytest.mark.parametrize("driver", ["psycopg2", "psycopg"])
    @pytest.mark.postgres
    def test_it_conforms_on_postgresql(self, driver: str, postgres_url: str) -> None:
        url = re.sub(r"^postgresql\+\w+", f"postgresql+{driver}", postgres_url)
        results = actions.run(lambda: SQLHarness(url))
        assert all(result.outcome == actions.PASSED for result in results), shown(results)

    def test_it_conforms_on_sqlite_and_the_command_says_so(self, tmp_path: Path) -> None:
        done = command(f"sqlite:///{tmp_path / 'ledger.db'}")
        assert done.returncode == 0, done.stdout
        assert done.stderr == ""
        counted = f"{len(CASES)} cases of 11 invariants: {len(CASES)} passed, 0 failed, 0 not run"
        assert done.stdout.splitlines()[-1] == counted

    def test_a_store_that_was_written_from_the_contract_alone_conforms_too(self) -> None:
        actions.assert_conforms(PlainHarness)

    def test_the_suite_needs_neither_celery_nor_pytest_nor_a_database_library(self) -> None:
        script = (
            "import sys, celery_idem.conformance.actions;"
            "print([name for name in ('celery', 'pytest', 'sqlalchemy') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "[]", done.stderr


class TestBrokenStores:
    @pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
    def test_it_is_caught_by_the_cases_it_names(self, broken: type[BrokenStore], tmp_path: Path) -> None:
        named = [case for case in CASES if case.name in broken.caught_by]
        results = check(broken, f"sqlite:///{tmp_path / 'ledger.db'}", named)
        assert failed(results) == broken.caught_by, shown(results)

    @pytest.mark.parametrize("broken", FIRST_OF_EACH, ids=lambda broken: broken.__name__)
    def test_it_is_caught_by_its_own_invariant_alone(self, broken: type[BrokenStore], tmp_path: Path) -> None:
        results = check(broken, f"sqlite:///{tmp_path / 'ledger.db'}")
        caught = {name.partition(".")[0] for name in failed(results)}
        assert caught == {invariant_of(broken)}, shown(results)

    def test_every_invariant_has_one_and_every_case_has_caught_one(self) -> None:
        assert len(FIRST_OF_EACH) == 11
        caught = {name for broken in BROKEN for name in broken.caught_by}
        assert caught == {case.name for case in CASES}


class WithoutEvents(SQLActionStore):
    """A store whose history cannot be read."""

    list_events = property()  # type: ignore[assignment]


class TestWhatCannotBeRun:
    """A store without ``list_events``, and then one without a way past it."""

    def harness(self, tmp_path: Path, **members: Any) -> SQLHarness:
        harness = SQLHarness(f"sqlite:///{tmp_path / 'ledger.db'}", WithoutEvents)
        for name, value in members.items():
            setattr(harness, name, value)
        return harness

    def results(self, tmp_path: Path, **members: Any) -> list[actions.CaseResult]:
        results = actions.run(lambda: self.harness(tmp_path, **members), ["I8"])
        return [result for result in results if result.outcome == actions.NOT_RUN]

    def test_it_is_told_and_does_not_pass(self, tmp_path: Path) -> None:
        results = self.results(tmp_path)
        assert [result.name for result in results] == [
            "I8.every_transition_appends_an_event",
            "I8.an_ambiguous_end_is_an_event_too",
        ]
        assert all("the store has no list_events" in result.told and not result.ok for result in results)

    def test_an_excuse_is_told_too_and_lets_the_store_pass(self, tmp_path: Path) -> None:
        results = self.results(tmp_path, excused={"list_events": "events go to another system"})
        assert len(results) == 2
        assert all(result.told == "events go to another system" and result.ok for result in results)

    def test_without_a_way_past_the_store_the_tampering_cases_are_not_run(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'ledger.db'}"

        def locked_up() -> SQLHarness:
            harness = SQLHarness(url)
            harness.tamper = None
            return harness

        results = actions.run(locked_up, ["I1"])
        tampering = {case.name for case in CASES if case.rule == "I1" and "tamper" in case.needs}
        assert {result.name for result in results if result.outcome == actions.NOT_RUN} == tampering == failed(results)
        assert all("no tamper hook" in result.told for result in results if not result.ok)


class TestTheReport:
    def test_a_store_that_does_not_conform_is_told_what_it_breaks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chosen = [case for case in CASES if case.rule == "I9"]
        monkeypatch.setattr(actions.SUITE, "cases", chosen)
        store = next(broken for broken in BROKEN if broken.__name__ == "NoWitnessWillDo")
        with pytest.raises(AssertionError, match="the store breaks I9") as caught:
            actions.assert_conforms(lambda: SQLHarness(f"sqlite:///{tmp_path / 'ledger.db'}", store))
        lines = str(caught.value).splitlines()[1:]
        assert lines == ["  I9.no_witness_at_all_is_refused failed: verify on [] was not refused"]

    def test_what_a_store_raises_unasked_is_a_failure_and_not_the_end(self, tmp_path: Path) -> None:
        class Raising(SQLActionStore):
            def complete(self, action_id: str, owner: str, result: Any) -> Any:
                raise ZeroDivisionError("by nobody")

        results = actions.run(lambda: SQLHarness(f"sqlite:///{tmp_path / 'ledger.db'}", Raising), ["I1"])
        assert [result.told.partition(" (")[0] for result in results if not result.ok] == [
            "ZeroDivisionError: by nobody"
        ]

    @pytest.mark.parametrize("invariants", [["I12"], ["I9.no_witness_at_all_is_refused"], "I9", []])
    def test_an_invariant_that_does_not_exist_is_no_pass(self, invariants: Any) -> None:
        with pytest.raises(ConfigurationError, match="invariants"):
            actions.run(PlainHarness, invariants)

    def test_every_case_says_which_store_it_catches(self) -> None:
        assert all(case.catches.startswith("A store ") for case in CASES)
        assert {case.rule for case in CASES} == set(actions.INVARIANTS)
        names = [case.name for case in CASES]
        assert len(names) == len(set(names))

    @pytest.mark.parametrize("arguments", [(), ("ledger.db",), ("sqlite:///a.db", "sqlite:///b.db")])
    def test_the_command_says_how_it_is_used(self, arguments: tuple[str, ...]) -> None:
        done = command(*arguments)
        assert done.returncode == 2
        assert "usage: " in done.stderr

    @pytest.mark.parametrize("url", ["mysql://u:secret@localhost/d", "sqlite:///no/such/directory/a.db"])
    def test_the_command_says_in_one_line_what_is_wrong_with_a_database(self, url: str) -> None:
        done = command(url)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert "secret" not in done.stderr

    def test_the_command_leaves_a_database_with_actions_alone(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'ledger.db'}"
        with SQLActionStore(url) as store:
            store.propose("key-1", "shop", "payments.refund", {"order": 7})
            done = command(url)
            assert done.returncode == 2
            assert "give it an empty one" in done.stderr
            assert len(store.find()) == 1
