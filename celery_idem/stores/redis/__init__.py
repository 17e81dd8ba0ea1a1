"""The Redis store: one script and one key per verb."""
