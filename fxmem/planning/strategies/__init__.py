"""Strategies that propose segments for plans, one a file; `registry.py` names them."""
