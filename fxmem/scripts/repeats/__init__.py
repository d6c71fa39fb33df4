"""Calls of models that repeat: after two that were recorded alike, others are copied."""
