"""Bases of plans: sums with independent noise, sums with correlated noise, JSON."""
