"""Convolutions on CUDA."""
