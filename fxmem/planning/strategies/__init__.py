"""Strategies that propose segments for plans, one a file; `builtin.py` names them."""
