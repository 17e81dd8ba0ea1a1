"""Every suite that fits the store a URL names: ``python -m celery_idem.conformance sqlite:///empty.db``.

The claims' suite always, the actions' where the same database can hold a ledger; 0 where everything passed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from celery_idem.conformance import claims
from celery_idem.conformance.suite import url_of

WITH_LEDGER = ("postgresql", "sqlite")


def main(arguments: Sequence[str]) -> int:
    """Run them; 1 where a case did not pass, 2 for wrong usage."""
    url = url_of(arguments, "celery_idem.conformance")
    if url is None:
        return 2
    ledger = url.partition(":")[0].partition("+")[0].lower() in WITH_LEDGER
    sys.stdout.write("claims\n" if ledger else "")
    status = claims.main([url])
    if status == 2 or not ledger:
        return status
    from celery_idem.conformance import actions

    sys.stdout.write("\nactions\n")
    return max(status, actions.main([url]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
