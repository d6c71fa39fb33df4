"""Real steps with and without a plan, compared bit for bit, and their measured peaks."""
