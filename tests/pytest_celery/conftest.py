"""The suite is collected where ``TEST_CONTAINERS`` says on what it runs; else ``test_suite.py`` runs it apart."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if os.environ.get("TEST_CONTAINERS"):
    collect_ignore = ["test_suite.py"]
    # A worker gets its tasks as a file of that name, and must not find ours under it.
    sys.path.insert(0, str(Path(__file__).with_name("suite")))
else:
    collect_ignore = ["suite"]
