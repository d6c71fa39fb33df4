"""Fourier transforms on the CPU (aten/src/ATen/mkl/SpectralOps.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from fxmem.lowering.arguments import tensor
from fxmem.lowering.cpu.target import CPU
from fxmem.lowering.tape import size_bytes
from fxmem.lowering.target import Arguments

_aten = torch.ops.aten


@CPU.workspace(_aten._fft_r2c.default, _aten._fft_c2c.default)
def _transform(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``_exec_fft``: other dimensions become one, and no element may be seen twice."""
    x, dims = tensor(args[0]), args[1]
    assert isinstance(dims, (list, tuple))
    transformed = {int(dim) % x.dim() for dim in dims}
    others = [dim for dim in range(x.dim()) if dim not in transformed and x.shape[dim] != 1]
    others.sort(key=x.stride, reverse=True)
    is_one = all(x.stride(a) == x.stride(b) * x.shape[b] for a, b in pairwise(others))
    return 0 if is_one and not _is_expanded(x) else size_bytes(x)


def _is_expanded(x: Tensor) -> bool:
    return any(x.stride(dim) == 0 and x.shape[dim] != 1 for dim in range(x.dim()))
