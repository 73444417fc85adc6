"""Optax transformations that make or use releases."""
