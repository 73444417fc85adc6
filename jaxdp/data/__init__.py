"""Data sets, files of users, bins and groups."""
