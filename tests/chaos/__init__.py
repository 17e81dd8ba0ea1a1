"""Chaos on real servers: a seeded storm of faults, a history written outside the system, and a checker of it."""
