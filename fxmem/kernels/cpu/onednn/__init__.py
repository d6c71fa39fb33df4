"""oneDNN's layouts and scratchpads, as the running PyTorch states them."""
