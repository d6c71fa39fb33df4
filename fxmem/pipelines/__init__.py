"""Pipelines: stages recorded one by one, and a schedule of micro-batches replayed over them."""
