"""Benchmarks: what fxmem says, held against what PyTorch really does.

`measure` runs real steps and never imports fxmem; `accuracy`, `coverage` and `speed` compare.
"""
