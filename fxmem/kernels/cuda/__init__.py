"""Operators and kernels of PyTorch's CUDA build."""

from __future__ import annotations

import sys

from fxmem.kernels import autocast, libraries, registry
from fxmem.kernels.cuda.gpu import CUDA

registry.import_modules(autocast)
registry.import_modules(sys.modules[__name__])
registry.import_modules(libraries)

__all__ = ["CUDA"]
