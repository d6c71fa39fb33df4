"""Pooling on CUDA: operands in the format that the input suggests, or in planes.

Source: ``aten/src/ATen/native/cuda/DilatedMaxPool2d.cu``, ``DilatedMaxPool3d.cu``,
``AveragePool2d.cu``, ``AveragePool3d.cu``, ``AdaptiveAveragePooling.cu``,
``AdaptiveAveragePooling3d.cu``, ``AdaptiveMaxPooling2d.cu``, ``AdaptiveMaxPooling3d.cu`` and
``MaxUnpooling.cu``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxmem.kernels.arguments import tensor
from fxmem.kernels.cuda.layouts import dense_bytes, suggest_format
from fxmem.kernels.cuda.target import CUDA
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten


def _suggested_bytes(model: Tensor, *operands: Tensor) -> int:
    """Copies of operands that are not dense in the format that the model suggests."""
    return sum(dense_bytes(x, suggest_format(model)) for x in operands)


def _list_results(outputs: object) -> list[Tensor]:
    found = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return [tensor(x) for x in found]


@CUDA.workspace(
    _aten.max_pool2d_with_indices.default,
    _aten.max_pool3d_with_indices.default,
    _aten.avg_pool2d.default,
)
def _pool(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``max_pool2d_with_indices_out_cuda`` and the like."""
    return _suggested_bytes(tensor(args[0]), tensor(args[0]))


@CUDA.workspace(
    _aten.avg_pool3d.default,
    _aten._adaptive_avg_pool3d.default,
    _aten.adaptive_max_pool3d.default,
)
def _pool_planes(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``avg_pool3d_out_cuda`` and the like: a contiguous input."""
    return dense_bytes(tensor(args[0]))


@CUDA.workspace(_aten._adaptive_avg_pool2d.default)
def _adaptive_average(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``adaptive_avg_pool2d_out_cuda_template``: channels last are read with their strides."""
    x = tensor(args[0])
    return dense_bytes(x) if suggest_format(x) == torch.contiguous_format and x.dim() == 4 else 0


@CUDA.workspace(_aten.adaptive_max_pool2d.default)
def _adaptive_maximum(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``adaptive_max_pool2d_out_cuda``: all in planes, results that are not by a copy."""
    return sum(dense_bytes(x) for x in (tensor(args[0]), *_list_results(outputs)))


@CUDA.workspace(
    _aten.max_pool2d_with_indices_backward.default,
    _aten.max_pool3d_with_indices_backward.default,
)
def _max_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``max_pool2d_with_indices_backward_out_cuda``: gradient, input and indices alike."""
    grad, x, indices = tensor(args[0]), tensor(args[1]), tensor(args[-1])
    operands = (grad, x, indices) if x.dim() < 5 else (grad, indices)
    return _suggested_bytes(x, *operands)


@CUDA.workspace(_aten.avg_pool2d_backward.default)
def _average_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``avg_pool2d_backward_out_cuda``."""
    grad, x = tensor(args[0]), tensor(args[1])
    return _suggested_bytes(x, grad, x)


@CUDA.workspace(
    _aten.avg_pool3d_backward.default,
    _aten._adaptive_avg_pool3d_backward.default,
    _aten.adaptive_max_pool3d_backward.default,
)
def _backward_planes(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``avg_pool3d_backward_out_cuda`` and the like: a contiguous gradient."""
    return dense_bytes(tensor(args[0]))


@CUDA.workspace(_aten._adaptive_avg_pool2d_backward.default)
def _adaptive_average_backward(
    args: Arguments, kwargs: Mapping[str, object], outputs: object
) -> int:
    """``adaptive_avg_pool2d_backward_out_cuda_template``."""
    grad, x = tensor(args[0]), tensor(args[1])
    return dense_bytes(grad) if suggest_format(x) == torch.contiguous_format else 0


@CUDA.workspace(_aten.adaptive_max_pool2d_backward.default)
def _adaptive_maximum_backward(
    args: Arguments, kwargs: Mapping[str, object], outputs: object
) -> int:
    """``adaptive_max_pool2d_backward_out_cuda``: all in planes, the result by a copy."""
    operands = (tensor(args[0]), tensor(args[2]), *_list_results(outputs))
    return sum(dense_bytes(x) for x in operands)


@CUDA.workspace(_aten.max_unpool2d.default, _aten.max_unpool3d.default)
def _unpool(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``max_unpooling2d_forward_out_cuda``: contiguous operands."""
    return dense_bytes(tensor(args[0])) + dense_bytes(tensor(args[1]))
