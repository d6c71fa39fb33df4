"""Operators that other packages bring, one file a package."""

from __future__ import annotations

from fxmem.kernels.cuda.gpu import CUDA
from fxmem.kernels.stand_ins import replace_extensions

CUDA.context(replace_extensions)
