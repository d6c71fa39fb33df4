"""CUDA as a target: the operators that it dispatches to, and what its kernels hold inside."""

from __future__ import annotations

from fxmem.lowering.cuda import autocast, cublas, dropout, reduction, surroundings
from fxmem.lowering.cuda.target import CUDA

__all__ = ["CUDA"]

# Imported for what they register.
_MODULES = (autocast, cublas, dropout, reduction, surroundings)
