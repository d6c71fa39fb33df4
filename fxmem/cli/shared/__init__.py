"""What the commands share: options, and the writing of results."""
