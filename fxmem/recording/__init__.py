"""One training or inference step, recorded on fake tensors."""
