"""Runs the python blocks of one page, in order, in one namespace: a process of its own, where warnings are errors.

Reads one JSON object a line on stdin, ``{"source", "filename"}``, and answers each on the descriptor named in argv with
``{"error"}``, null or a traceback.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from pathlib import Path


def main() -> None:
    """Until stdin ends."""
    warnings.simplefilter("error")
    warnings.filterwarnings("default", module=r"(celery|kombu|sqlalchemy)\.")  # theirs to heed, not a reader's
    sys.path.insert(0, str(Path.cwd()))
    namespace = {"__name__": "page"}
    sys.modules["page"] = type(sys)("page")
    with open(int(sys.argv[1]), "w", encoding="utf-8") as answers:  # noqa: PTH123  a descriptor has no path
        for line in sys.stdin:
            block = json.loads(line)
            error = None
            try:
                exec(compile(block["source"], block["filename"], "exec", dont_inherit=True), namespace)
            except BaseException:  # SystemExit is a failure here too
                error = traceback.format_exc()
            sys.stdout.flush()
            answers.write(json.dumps({"error": error}) + "\n")
            answers.flush()
    from celery_idem.app import close_all

    close_all()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
