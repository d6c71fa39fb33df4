"""What PyTorch really allocates, to compare with."""
