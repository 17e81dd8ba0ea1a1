"""Every target, in the order they run."""

from __future__ import annotations

from tests.fuzz import codec, gates, headers, keys, ledger, stored

TARGETS = [*keys.TARGETS, *codec.TARGETS, *gates.TARGETS, *ledger.TARGETS, *stored.TARGETS, *headers.TARGETS]
