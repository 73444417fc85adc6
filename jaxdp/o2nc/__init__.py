"""Private online-to-non-convex conversion, and private prefix sums."""
