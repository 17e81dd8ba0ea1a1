"""The clock of ``celery_idem.testing``, where our own tests look for it."""

from celery_idem.testing.clock import START, ManualClock

__all__ = ["START", "ManualClock"]
