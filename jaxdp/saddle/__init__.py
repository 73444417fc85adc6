"""Private mirror descent: saddle points, convex problems, synthetic data.

Reference:
  Gonzalez, Guzman, Paquette, `Mirror Descent Algorithms with Nearly Dimension-Independent
  Rates for Differentially-Private Stochastic Saddle-Point Problems
  <https://arxiv.org/abs/2403.02912>`_, 2024; elsewhere by its authors alone.
"""
