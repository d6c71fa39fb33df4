"""Sweeps of many analyses."""
