"""Training scripts that load, evaluate, save and resume: DEVICE CHECKPOINT are their arguments."""
