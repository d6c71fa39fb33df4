"""PyTorch's releases: which is installed, and what not every one of them has."""
