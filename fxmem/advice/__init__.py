"""Other ways to a lower peak than computing again: options, loops, the host's memory, folding."""
