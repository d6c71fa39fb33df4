"""Parallel training: meshes of processes that are not there, and the wrappers of PyTorch."""
