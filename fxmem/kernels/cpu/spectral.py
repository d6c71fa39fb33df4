"""Fourier transforms on the CPU (aten/src/ATen/mkl/SpectralOps.cpp)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fxmem.kernels.arguments import tensor
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.tape import Tape, size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten


@CPU.workspace(_aten._fft_r2c.default, _aten._fft_c2c.default)
def _transform(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``_fft_r2c_mkl`` and ``_fft_c2c_mkl``."""
    return _copied_bytes(tensor(args[0]), _dims(args))


@CPU.workspace(_aten._fft_c2r.default)
def _transform_to_real(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``_fft_c2r_mkl``: other dimensions than the last are transformed among complex numbers."""
    x, dims = tensor(args[0]), _dims(args)
    *others, last = dims
    if not others:
        return _copied_bytes(x, dims)
    tape = Tape()
    between = _aten._fft_c2c(x, others, 0, False)
    tape.allocate(size_bytes(between))
    tape.free(tape.allocate(_copied_bytes(x, others)))
    result = tape.allocate(size_bytes(tensor(outputs)))
    tape.allocate(_copied_bytes(between, [last]))
    return max(0, tape.peak_bytes - result)


def _dims(args: Arguments) -> list[int]:
    dims = args[1]
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
