"""Dropout on CUDA: one kernel, which keeps a mask of a byte per element."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxmem.graph import Blocks
from fxmem.kernels.cuda.target import CUDA, is_on_gpu
from fxmem.kernels.tape import BlockTape
from fxmem.kernels.target import Arguments


@CUDA.function(torch.dropout)
def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """aten/src/ATen/native/Dropout.cpp, ``dropout``, ``is_fused_kernel_acceptable``.

    There is no such kernel in place, nor for whole channels.
    """
    if not (is_on_gpu(input) and train and 0 < p < 1 and input.numel() > 0):
        return torch.dropout(input, p, train)
    return torch.native_dropout(input, p, train)[0]


@CUDA.workspace(torch.ops.aten.native_dropout.default)
def _native_dropout(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> Blocks:
    """cuda/Dropout.cu, ``dropout_cuda``: the mask comes first."""
    tape = BlockTape()
    tape.allocate_result(1)
    tape.allocate_result(0)
    return tape.finish()
