"""The tests, importable as a package so that ``tests.support`` can never be another distribution's."""
