"""What spin is asked: each model as it is, at sizes that fit, and without one rule at a time."""

from __future__ import annotations

from tests.model.spin import Job

AS_THEY_ARE = (
    Job("claim", ("CRASHES=1", "RESTORES=1", "LAPSES=1")),
    Job("claim", ("CRASHES=1", "LAPSES=1", "FAILURES=1")),
    Job("claim", ("GENERATIONS=2", "CRASHES=1")),
    Job("claim", ("GENERATIONS=2", "RESTORES=1")),
    Job("claim", ("WORKERS=2", "GENERATIONS=2", "CRASHES=1", "RESTORES=1", "LAPSES=1")),
    Job("claim", ("MESSAGES=2", "CRASHES=1", "FAILURES=1")),
    Job("claim", ("GENERATIONS=2", "CRASHES=1", "RESTORES=1", "LAPSES=1", "FAILURES=1"), minutes=1),
    Job("action"),
    Job("action", ("WORKERS=3", "CRASHES=3", "LAPSES=3")),
)
"""Three workers where nothing else is said, two for an action; one key."""
BROKEN = (
    Job("claim", ("STEAL", "RESTORES=1"), quick=True),
    Job("claim", ("NO_RIGHT", "RESTORES=1"), quick=True),
    Job("claim", ("NO_OVER", "FAILURES=1", "RESTORES=1"), quick=True),
    Job("claim", ("NO_NOT_DUE", "GENERATIONS=2", "RESTORES=1"), quick=True),
    Job("claim", ("NO_FENCE", "RESTORES=1", "LAPSES=1"), quick=True),
    Job("claim", ("NO_SETTLED", "RESTORES=1"), quick=True),
    Job("claim", ("TELL_LATE", "FAILURES=1", "CRASHES=1"), quick=True),
    Job("claim", ("ACK_FIRST", "RESTORES=1", "CRASHES=1"), quick=True),
    Job("action", ("ANY_STATE",), quick=True),
    Job("action", ("TWO_STATEMENTS",), quick=True),
    Job("action", ("EXECUTE_FIRST",), quick=True),
    Job("action", ("RECOVER_TO_GATED",), quick=True),
    Job("action", ("FAIL_WHEN_KILLED",), quick=True),
)
"""Each must be found wanting."""
