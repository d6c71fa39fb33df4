"""Public training scripts that ``fxmem run`` is tried on, unchanged: launches, data and results."""
