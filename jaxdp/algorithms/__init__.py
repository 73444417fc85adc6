"""Algorithms: what owns iterates, phases or players, and returns a point of its own."""
