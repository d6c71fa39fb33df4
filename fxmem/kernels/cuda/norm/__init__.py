"""Normalisations on CUDA."""
