"""The cases of the suite for claim stores; ``conformance.claims`` runs them."""
