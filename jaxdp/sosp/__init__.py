"""Private search for second-order stationary points."""
