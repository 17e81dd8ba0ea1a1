"""The SQL store: SQLite and PostgreSQL through SQLAlchemy Core."""
