"""Models that tests analyse."""
