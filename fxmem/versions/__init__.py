"""Differences between the releases of PyTorch."""
