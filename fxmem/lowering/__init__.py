"""What the target device would run: functions and fake kernels, and what kernels allocate inside."""
