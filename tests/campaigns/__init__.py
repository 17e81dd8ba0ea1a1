"""Long runs with a table at the end: ``python -m tests.campaigns.kills``, ``…outage``.

Each starts private servers, prints one Markdown table, and exits with 1 when a promise is broken. ``tests/crash`` runs
the same code with small numbers.
"""
