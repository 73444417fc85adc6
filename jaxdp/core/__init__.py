"""Vocabulary of the library: keys, integer noise, states of runs, checks of arguments."""
