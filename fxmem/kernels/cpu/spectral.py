"""Fourier transforms on the CPU (aten/src/ATen/mkl/SpectralOps.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fxmem.kernels.registry import CPU, Call
from fxmem.kernels.workspace import PeakTrace, size_bytes

_aten = torch.ops.aten


@CPU.workspace("_fft_r2c", "_fft_c2c")
def _transform(call: Call) -> int:
    """``_fft_r2c_mkl`` and ``_fft_c2c_mkl``."""
    return _copied_bytes(call.tensor(0), _dims(call))


@CPU.workspace("_fft_c2r")
def _transform_to_real(call: Call) -> int:
    """``_fft_c2r_mkl``: other dimensions than the last are transformed among complex numbers."""
    x, dims = call.tensor(0), _dims(call)
    *others, last = dims
    if not others:
        return _copied_bytes(x, dims)
    trace = PeakTrace()
    between = _aten._fft_c2c(x, others, 0, False)
    trace.allocate(size_bytes(between))
    trace.free(trace.allocate(_copied_bytes(x, others)))
    result = trace.allocate(size_bytes(call.result))
    trace.allocate(_copied_bytes(between, [last]))
    return max(0, trace.peak_bytes - result)


def _dims(call: Call) -> list[int]:
    dims = call.args[1]
    assert isinstance(dims, (list, tuple))
    return [int(dim) for dim in dims]


def _copied_bytes(x: Tensor, dims: Sequence[int]) -> int:
    """``_exec_fft``: other dimensions become one, and no element may be seen twice."""
    transformed = {dim % x.dim() for dim in dims}
    others = [dim for dim in range(x.dim()) if dim not in transformed and x.shape[dim] != 1]
    others.sort(key=x.stride, reverse=True)
    is_one = all(x.stride(a) == x.stride(b) * x.shape[b] for a, b in pairwise(others))
    return 0 if is_one and not _is_expanded(x) else size_bytes(x)


def _is_expanded(x: Tensor) -> bool:
    return any(x.stride(dim) == 0 and x.shape[dim] != 1 for dim in range(x.dim()))
