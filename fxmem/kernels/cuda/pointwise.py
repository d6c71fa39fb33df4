"""Elementwise operators and distances on CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.arguments import tensor
from fxmem.kernels.cuda.target import CUDA, is_on_gpu
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
_CHUNK = 65536


@CUDA.kernel(_aten.log_sigmoid_forward.default)
def log_sigmoid_forward(input: Tensor) -> Any:
    """aten/src/ATen/native/cuda/Activation.cpp, ``log_sigmoid_forward_cuda``: no buffer."""
    if not is_on_gpu(input):
        return NotImplemented
    return torch.empty_like(input), input.new_empty(0)


@CUDA.workspace(_aten._cdist_backward.default)
def _cdist_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/cuda/DistanceKernel.cu, ``cdist_backward_kernel_impl``.

    What each pair contributes, added up afterwards.
    """
    first, distances = tensor(args[1]), tensor(args[4])
    return distances.numel() * first.shape[-1] * first.element_size()


@CUDA.workspace(_aten._foreach_norm.Scalar)
def _foreach_norm(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/cuda/ForeachReduceOp.cu, ``foreach_tensor_norm_cuda``.

    A sum for each chunk, as many for each tensor as the largest one has.
    """
    tensors = args[0]
    assert isinstance(tensors, (list, tuple))
    most = max((-(-tensor(x).numel() // _CHUNK) for x in tensors), default=0)
    return len(tensors) * most * max(4, tensor(tensors[0]).element_size()) if tensors else 0
