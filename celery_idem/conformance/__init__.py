"""Suites that a store which is not ours can run against itself; ``actions`` is the one for action stores."""
