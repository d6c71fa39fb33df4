"""Rearranging on CUDA: intermediates and contiguous copies."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxmem.kernels.arguments import argument, tensor
from fxmem.kernels.cuda.layouts import dense_bytes
from fxmem.kernels.cuda.target import CUDA
from fxmem.kernels.tape import size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten


@CUDA.workspace(_aten.roll.default)
def _roll(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/cuda/TensorTransformations.cu, ``roll_cuda``.

    One dimension after the other, each intermediate held; a contiguous input.
    """
    x, dims = tensor(args[0]), argument(args, kwargs, 2, "dims")
    count = len(dims) if isinstance(dims, (list, tuple)) else 0
    return max((count - 1) * size_bytes(x), dense_bytes(x))
