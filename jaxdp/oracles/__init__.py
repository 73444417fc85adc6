"""Oracles: one bounded and noised query each. Nothing un-noised leaves this folder."""
