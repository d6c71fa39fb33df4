"""Operators that fake tensors run otherwise than real tensors of any device."""
