"""Training scripts, run unchanged and recorded step by step."""
