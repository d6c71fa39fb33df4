"""Meshes of GPUs that a step fits, with the knobs that it takes there."""
