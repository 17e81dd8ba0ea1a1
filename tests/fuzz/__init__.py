"""Hypothesis throws what nobody would send at keys, codec, gate, ledger, stored records and message headers."""
