"""The real code under a scheduler that decides everything: who runs, who dies, what is lost, and what time it is.

``world`` is one run: workers, clock, broker, results and store, and the points at which the scheduler may interfere.
``house`` is what runs in it: Celery apps with idempotent tasks, one per worker. ``ledger`` judges. ``explore`` walks
through the schedules, ``reverted`` takes rules out of the product to see that they are missed.
"""
