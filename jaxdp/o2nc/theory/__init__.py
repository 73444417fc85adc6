"""Guarantees and designs of online-to-non-convex plans."""
