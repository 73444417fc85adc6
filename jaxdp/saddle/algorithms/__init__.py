"""Algorithms of private mirror descent."""
