"""CUDA's autocast on fake tensors."""
