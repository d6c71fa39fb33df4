"""Reductions on CUDA, and the iterator and buffers behind them."""
