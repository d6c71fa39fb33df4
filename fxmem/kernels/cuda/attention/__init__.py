"""Attention on CUDA, by backend."""
