"""Dropout on CUDA: one kernel, which keeps a mask of a byte per element."""

from __future__ import annotations

import torch
from torch import Tensor

from fxmem.lowering.cuda.target import CUDA, is_on_gpu


@CUDA.function(torch.dropout)
def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """aten/src/ATen/native/Dropout.cpp, ``dropout``, ``is_fused_kernel_acceptable``.

    There is no such kernel in place, nor for whole channels.
    """
    if not (is_on_gpu(input) and train and 0 < p < 1 and input.numel() > 0):
        return torch.dropout(input, p, train)
    return torch.native_dropout(input, p, train)[0]
