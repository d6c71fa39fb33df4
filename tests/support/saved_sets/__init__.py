"""Tensors that operators save for backward on CUDA, by hand from PyTorch 2.13's sources.

What a formula in ``tools/autograd/derivatives.yaml`` names is saved if the gradient that it is
for is asked for; of ``x.sym_sizes()`` and ``zeros_like(x)`` only the sizes are
(``load_derivatives.py``).
"""

from __future__ import annotations

from saved_sets import networks, normalization, operators
from saved_sets.row import Row

ROWS: tuple[Row, ...] = (*operators.ROWS, *networks.ROWS, *normalization.ROWS)
"""All of them."""
