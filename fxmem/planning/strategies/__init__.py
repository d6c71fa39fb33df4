"""Searches for plans: one strategy a file, each a generator of candidates."""
