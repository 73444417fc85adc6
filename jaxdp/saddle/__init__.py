"""Private mirror descent: saddle points, convex problems, synthetic data."""
