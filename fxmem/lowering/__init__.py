"""What the target device would run, and what its kernels allocate inside themselves."""
