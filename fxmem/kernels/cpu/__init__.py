"""Operators and kernels of PyTorch's CPU build.

A dispatch mode sees an operator's inputs and outputs, and not the buffers that its C++ kernel
takes from the CPU allocator and returns before it ends. Each registered function states one
kernel's buffers from shapes alone, and names the file and function of PyTorch that it follows.
Sizes are as in the allocations that PyTorch's own profiler reports; buffers that other
threads of a parallel loop take for themselves are not among them.
"""

from __future__ import annotations

import sys

from fxmem.kernels import registry
from fxmem.kernels.registry import CPU

registry.import_modules(sys.modules[__name__])

__all__ = ["CPU"]
