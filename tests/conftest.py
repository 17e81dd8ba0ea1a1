"""Fixtures for every part of the suite, and the rule that nothing is skipped in silence.

Servers are private and shared by the whole run, started at first use; each test gets a Redis database, a PostgreSQL
database and a RabbitMQ virtual host of its own. A test that kills or pauses a server takes a ``private_…`` one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import STARTED
from tests.support.services import USED, PostgresServer, RabbitServer, RedisServer

pytest_plugins = ("tests.support.guarantees",)

# -- servers of the run ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """The run's Redis, shared: never stop or pause it."""
    server = RedisServer.resolve()
    yield server
    server.close()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The run's PostgreSQL, shared: never stop or pause it."""
    server = PostgresServer.resolve()
    yield server
    server.close()


@pytest.fixture(scope="session")
def rabbit_server() -> Iterator[RabbitServer]:
    """The run's RabbitMQ, shared: never stop or pause it."""
    server = RabbitServer.resolve()
    yield server
    server.close()


# -- one test's place on them ------------------------------------------------------------------------------------------


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """An empty Redis database of this test's own (0.5 ms); ``redis_server.new_database()`` gives another one."""
    return redis_server.new_database()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """An empty PostgreSQL database of this test's own, dropped afterwards."""
    url = postgres_server.create_database()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture
def amqp_url(rabbit_server: RabbitServer) -> str:
    """A RabbitMQ virtual host of this test's own (0.2 s).

    With ``TEST_AMQP_URL`` it is the shared one of that URL: apart only by queue names, which ``TaskApp`` draws.
    """
    return rabbit_server.create_vhost()


# -- servers to hurt ---------------------------------------------------------------------------------------------------


@pytest.fixture
def private_redis() -> Iterator[RedisServer]:
    """A Redis to kill, pause or restart (0.1 s)."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def private_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL to kill, pause or restart (0.6 s)."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def private_rabbit() -> Iterator[RabbitServer]:
    """A RabbitMQ to kill, pause or restart (4 to 10 s)."""
    with RabbitServer() as server:
        yield server


# -- nothing is skipped in silence -------------------------------------------------------------------------------------


class Tally:
    """Counts what passed, and remembers what did not run as a test should."""

    def __init__(self) -> None:
        self.passed = 0
        self.deselected = 0
        self.unrun: list[str] = []

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Count one report."""
        if report.skipped or hasattr(report, "wasxfail"):
            self.unrun.append(f"{report.nodeid}: {_reason(report)}")
        elif isinstance(report, pytest.TestReport) and report.when == "call" and report.passed:
            self.passed += 1


_tally = Tally()


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"xfail {report.wasxfail}".rstrip()
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a test."""
    _tally.note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Notice a module that skipped itself."""
    if report.skipped:
        _tally.note(report)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count what a -k or -m left out."""
    _tally.deselected += len(items)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when anything was skipped or expected to fail, and write the count of what passed.

    The count goes to the file ``TEST_COUNT_FILE`` names, for the floor in ``.ci/run``.
    """
    if hasattr(session.config, "workerinput"):  # one process of several, whose reports go to the one that started them
        session.config.workeroutput["servers"] = [(server.title, server.describe) for server in USED]  # type: ignore[attr-defined]
        return
    if _tally.unrun and session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    count_file = os.environ.get("TEST_COUNT_FILE")
    if count_file:
        Path(count_file).write_text(f"{_tally.passed}\n")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Learn which servers one process of several used."""
    _servers.extend(map(tuple, getattr(node, "workeroutput", {}).get("servers", ())))


_servers: list[tuple[str, str]] = []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the servers the tests ran on, and what did not run."""
    used = [*_servers, *((server.title, server.describe) for server in USED)]
    for title in dict.fromkeys(title for title, _ in used):
        described = [text for named, text in used if named == title]
        more = f" and {len(described) - 1} more of the same" if len(described) > 1 else ""
        terminalreporter.write_line(f"{described[0]}{more}")
    if _tally.deselected:
        terminalreporter.write_line(f"{_tally.deselected} deselected: this was not the whole suite", yellow=True)
    for line in _tally.unrun:
        terminalreporter.write_line(f"NOT RUN, so the run fails: {line}", red=True)


# -- a failure shows the logs of the processes it used -----------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let the shared servers' logs begin at this test."""
    for process in STARTED:
        process.mark_log()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Add the end of every log to a failed test's report; forget processes that are gone once a test is over."""
    report: pytest.TestReport = yield
    if report.failed:
        for process in STARTED:
            tail = process.log_tail(60).strip()
            if tail:
                report.sections.append((f"log of {process.name} (pid {process.pid})", tail))
    if call.when == "teardown":
        STARTED[:] = [process for process in STARTED if process.alive]
    return report
