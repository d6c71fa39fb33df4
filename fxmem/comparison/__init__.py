"""Comparison of two steps at their peaks, and findings for people and for CI."""
