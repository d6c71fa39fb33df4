"""Recurrent layers and cells on CUDA."""
