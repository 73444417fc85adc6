"""Private second-order stationary points: adaptive batches, escapes, certificates."""
