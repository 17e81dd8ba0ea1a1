"""Django's own connection for a run's transaction: what the ORM writes commits together with the task's completion.

Django's database must be the store's. Which database that is nobody needs to compare: the first statement locks the
claim's record on Django's connection, and only the store's own database has it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from celery.contrib.django.task import DjangoTask as CelerysDjangoTask
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.transaction import TransactionManagementError

from celery_idem.core.context import RunContext
from celery_idem.errors import ConfigurationError
from celery_idem.task import IdempotentTask


class DjangoTask(IdempotentTask, CelerysDjangoTask):  # type: ignore[type-arg]  # not subscriptable
    """``IdempotentTask`` with ``delay_on_commit`` and ``apply_async_on_commit``, for ``base=`` in a Django project."""

    abstract = True


def django_transaction(run: RunContext, using: str = DEFAULT_DB_ALIAS) -> AbstractContextManager[Any]:
    """``run.transaction()`` on Django's connection: an ``atomic`` block that lasts until the body returns.

    Args:
        run: ``self.idempotency`` in a task, or ``celery_idem.current()``.
        using: Django's name of the database.

    Raises:
        ConfigurationError: the database is not the store's, or an ``atomic`` block is open already.
        LeaseLost: another worker holds the key.
        StoreUnavailable: the database does not answer.
    """
    return run.effects.transaction(DjangoCarrier(using))


@dataclass
class DjangoCarrier:
    """See ``Carrier``; two of one database are the same."""

    using: str
    _atomic: Any = field(default=None, compare=False)
    _driver: Any = field(default=None, compare=False)
    _hooks: list[Any] = field(default_factory=list, compare=False)

    @property
    def connection(self) -> Any:
        """Django's wrapper."""
        return connections[self.using]

    @property
    def line(self) -> _Line:
        """The driver's connection: the store's statements are written for that."""
        return _Line(self._driver)

    def begin(self, deadline: float) -> None:  # noqa: ARG002  Django has connect timeouts of its own
        """See ``Carrier.begin``."""
        connection = self.connection
        if connection.vendor not in {"postgresql", "sqlite"}:
            raise ConfigurationError(f"Django's database {self.using!r} is on {connection.vendor}: no store is there")
        if connection.in_atomic_block or not connection.get_autocommit():
            raise ConfigurationError(
                f"a transaction is open already on Django's database {self.using!r}: begin django_transaction outside "
                "of atomic(), and test it in a TransactionTestCase"
            )
        atomic = transaction.atomic(using=self.using)
        atomic.__enter__()
        self._atomic, self._driver = atomic, connection.connection

    def check(self) -> None:
        """See ``Carrier.check``."""
        connection = self.connection
        whole = connection.in_atomic_block and not connection.savepoint_ids and not connection.closed_in_transaction
        if not whole or connection.needs_rollback:
            raise TransactionManagementError(
                "django_transaction was marked for rollback, closed or cut off before the body returned, so what was "
                "written is not there: to take it back, let an exception leave the with statement"
            )

    def commit(self) -> None:
        """See ``Carrier.commit``."""
        connection, atomic = self.connection, self._atomic
        # They may take as long as they like, so not while the commit is timed.
        self._hooks, connection.run_on_commit = connection.run_on_commit, []
        self._atomic = None
        atomic.__exit__(None, None, None)

    def committed(self) -> None:
        """Run what ``transaction.on_commit`` collected."""
        self.connection.run_on_commit = self._hooks
        self.connection.run_and_clear_commit_hooks()

    def rollback(self) -> None:
        """See ``Carrier.rollback``."""
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            self.connection.needs_rollback = True
            atomic.__exit__(None, None, None)

    def savepoint(self) -> AbstractContextManager[Any]:
        """See ``Carrier.savepoint``; where there is no transaction, it is one."""
        atomic: AbstractContextManager[Any] = transaction.atomic(using=self.using)
        return atomic


@dataclass(frozen=True)
class _Line:
    dbapi_connection: Any

    def cursor(self) -> Any:
        return self.dbapi_connection.cursor()

    def invalidate(self, _error: BaseException | None = None) -> None:
        """Django closes a connection whose rollback fails."""
