"""Code under torch.compile, as PyTorch's own compiler lowers it for a GPU that is not there."""
