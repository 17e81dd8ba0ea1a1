"""The Redis store: one hash per record, one script per verb, one key per script."""
