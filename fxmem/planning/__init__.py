"""Plans: what a step keeps, and what it computes again when backward needs it."""
