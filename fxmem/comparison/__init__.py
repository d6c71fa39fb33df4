"""Comparison of two steps at their peaks, and verdicts for people and for CI."""
