"""Dropout on CUDA: one kernel, which keeps a mask of a byte per element."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fxmem.lowering.cuda.target import CUDA, is_on_gpu


def _is_fused(input: Tensor, p: float, train: bool) -> bool:
    """aten/src/ATen/native/Dropout.cpp, ``dropout``, ``is_fused_kernel_acceptable``."""
    return is_on_gpu(input) and train and 0 < p < 1 and input.numel() > 0


@CUDA.function(torch.dropout)
def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """aten/src/ATen/native/Dropout.cpp, ``dropout``."""
    if not _is_fused(input, p, train):
        return torch.dropout(input, p, train)
    return torch.native_dropout(input, p, train)[0]


@CUDA.function(functional.dropout)
def functional_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """``torch.nn.functional.dropout``; in place there is no fused kernel."""
    if inplace or not _is_fused(input, p, training):
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]
