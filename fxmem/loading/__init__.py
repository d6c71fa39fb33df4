"""From a TARGET and its inputs to a model, without memory for its parameters."""
