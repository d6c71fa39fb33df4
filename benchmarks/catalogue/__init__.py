"""Functions of PyTorch with inputs of a size at which they are the peak themselves."""
