"""Columns of image patches on the CPU: outputs that were first made as large as the input.

PyTorch's fake kernels return storages of the output's size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.arguments import new_bytes, tensor
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.tape import Tape, size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
_im2col, _col2im = _aten.im2col.default, _aten.col2im.default


def _resize(x: Tensor, result: Tensor) -> Tensor:
    """``empty_like(x)``, resized: the storage does not shrink."""
    if x.numel() <= result.numel():
        return result
    strides = [math.prod(result.shape[dim + 1 :]) for dim in range(result.dim())]
    return torch.empty_like(x).as_strided(result.shape, strides)


@CPU.kernel(_im2col)
def im2col(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """aten/src/ATen/native/Im2Col.cpp, ``im2col_cpu``."""
    return _resize(x, _im2col(x, *args, **kwargs))


@CPU.kernel(_col2im)
def col2im(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """aten/src/ATen/native/Col2Im.cpp, ``col2im_cpu``."""
    return _resize(x, _col2im(x, *args, **kwargs))


@CPU.workspace(_im2col, _col2im)
def _columns(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Im2Col.cpp and Col2Im.cpp: a contiguous input, and memory before it is made larger."""
    x = tensor(args[0])
    tape = Tape()
    tape.allocate(size_bytes(x))
    tape.allocate(0 if x.is_contiguous() else size_bytes(x))
    if new_bytes(outputs) > size_bytes(x):
        tape.allocate(new_bytes(outputs))
    return tape.peak_bytes - new_bytes(outputs)
