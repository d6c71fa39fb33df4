"""The step as a chain of stages, and the cheapest schedules of a chain."""
