"""The SQL store: SQLite and PostgreSQL through SQLAlchemy Core."""

from celery_idem.stores.sql.schema import metadata
from celery_idem.stores.sql.store import SQLStore

__all__ = ["SQLStore", "metadata"]
