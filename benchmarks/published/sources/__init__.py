"""The models that others measured, written anew, one source a module."""
