"""The CPU as a target: its functions, and what its kernels allocate inside themselves.

A dispatch mode sees an operator's inputs and outputs, and not the buffers that its C++ kernel
takes from the CPU allocator and returns before it ends. Each registered function states one
kernel's buffers from shapes alone, and names the file and function of PyTorch that it follows.
Sizes are those of the allocations that PyTorch's own profiler reports; buffers that other
threads of a parallel loop take for themselves are not among them.
"""

from __future__ import annotations

from fxmem.kernels.cpu import (  # noqa: F401 - for what they register
    activation,
    attention,
    columns,
    convolution_operators,
    copying,
    decompositions,
    embedding,
    grouped,
    indexing,
    linalg,
    linear,
    losses,
    masked,
    mkldnn_rnn,
    normalization,
    pointwise,
    pooling,
    reduction,
    resampling,
    rnn,
    sampling,
    sorting,
    spectral,
    transformer,
    trilinear,
)
from fxmem.kernels.cpu.target import CPU

__all__ = ["CPU"]
