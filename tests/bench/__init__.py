"""What it costs, measured against what it could cost at best, all in one run: ``python -m tests.bench``.

Each part is a module with ``run(arguments) -> (printed, broken)``: its tables, and the promises that did not hold.
"""
