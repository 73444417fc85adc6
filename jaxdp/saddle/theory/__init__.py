"""Guarantees and designs of plans for private mirror descent."""
