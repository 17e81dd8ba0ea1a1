"""The ledger of governed actions on PostgreSQL and SQLite."""
