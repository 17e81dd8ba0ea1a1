"""``make conformance``: every store broken on purpose against every case."""

import sys

from tests.conformance.broken_actions import main

sys.exit(main())
