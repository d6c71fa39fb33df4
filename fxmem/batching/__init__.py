"""The largest batch, or other size of the inputs, that fits a memory."""
