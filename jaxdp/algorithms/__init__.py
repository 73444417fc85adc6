"""Algorithms: methods that own iterates, phases or players and return their own point."""
