"""Would the tests notice? Changes to the mechanism, one at a time, against its tests: ``python -m tests.mutants``.

The changes are cosmic-ray's (extra ``mutants``). What no test notices is judged in ``judged.txt``, or gets a test.
"""
