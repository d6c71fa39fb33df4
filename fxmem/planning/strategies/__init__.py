"""Strategies that propose segments for plans; `builtin.py` names them."""
