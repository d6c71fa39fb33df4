"""Comparison of two steps at their peaks."""
