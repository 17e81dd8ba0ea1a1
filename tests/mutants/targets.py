"""Which files are changed, and the quick tests that ought to notice each change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One file, what is run for each of its mutants, and how many of them a run without ``--whole`` draws."""

    file: str
    tests: tuple[str, ...]
    """Words for pytest, the likeliest to notice first."""
    drawn: int


NO_PROCESSES = "not processes and not fifty and not stopped and not killed and not private and not forked"
"""Left out of the contract: tests that start processes of their own, too slow to ask a thousand times."""


def _contract(*stores: str) -> tuple[str, ...]:
    names = " or ".join(stores)
    return (
        "tests/contract/test_contract_table.py",
        "tests/contract/test_contract_verbs.py",
        "tests/contract/test_contract_rules.py",
        "tests/contract/test_contract_upkeep.py",
        f"-k=(unit or {names}) and {NO_PROCESSES}",
    )


LEDGER = (
    "tests/governed/test_ledger_verbs.py",
    "tests/governed/test_ledger_decisions.py",
    "tests/governed/test_ledger_arguments.py",
    "tests/governed/test_ledger_tampering.py",
    "tests/conformance/test_actions.py::TestStoresThatConform::test_it_conforms_on_sqlite_and_the_command_says_so",
    f"-k=sqlite and {NO_PROCESSES}",
)

TARGETS = (
    Target(
        "celery_idem/governed/gate.py", ("tests/governed/test_gate.py", "tests/governed/test_no_way_around.py"), 100
    ),
    Target("celery_idem/core/decide.py", ("tests/unit/test_decide.py", "tests/unit/test_decide_properties.py"), 100),
    Target(
        "celery_idem/core/engine.py",
        ("tests/unit/test_engine.py", "tests/unit/test_task.py", "tests/unit/test_transaction.py"),
        50,
    ),
    Target("celery_idem/core/replay.py", ("tests/unit/test_engine.py", "tests/unit/test_task.py"), 15),
    Target("celery_idem/governed/sql/dispatch.py", LEDGER, 36),
    Target(
        "celery_idem/stores/sql/store.py",
        (
            *_contract("sqlite", "psycopg2"),
            "tests/contract/test_sql_cost.py",
            "tests/contract/test_sql_concurrency.py::test_a_locked_sqlite_file",
        ),
        36,
    ),
    Target(
        "celery_idem/core/run.py",
        (
            "tests/unit/test_engine.py",
            "tests/unit/test_task.py",
            "tests/unit/test_transaction.py",
            "tests/contract/test_sql_transaction.py::test_a_begin_without_an_answer_is_an_outage_and_not_the_bodys_failure",
            "tests/unit/test_soft_limits.py",
        ),
        40,
    ),
    Target("celery_idem/stores/sql/rows.py", ("tests/unit/test_sql_rows.py", *_contract("sqlite")), 30),
    Target("celery_idem/core/keys.py", ("tests/unit/test_keys.py", "tests/unit/test_canonical.py"), 30),
    Target("celery_idem/governed/sql/lifecycle.py", LEDGER, 30),
    Target("celery_idem/stores/redis/store.py", _contract("redis"), 30),
)
"""In the order of what a fault in them would cost."""
