"""A plan applied to a model: the same parameters, the same numbers, less memory."""
