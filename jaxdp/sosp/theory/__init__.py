"""Guarantees and designs of plans for second-order stationary points."""
