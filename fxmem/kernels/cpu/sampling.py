"""Pooling on the CPU: contiguous copies."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxmem.kernels.arguments import tensor
from fxmem.kernels.cpu.copying import copies_bytes
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.tape import size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten


@CPU.workspace(
    _aten.max_pool2d_with_indices.default,
    _aten.avg_pool2d.default,
    _aten._adaptive_avg_pool2d.default,
    _aten.adaptive_max_pool2d.default,
)
def _contiguous(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """cpu/MaxPoolKernel.cpp, AvgPoolKernel.cpp, AdaptiveAvgPoolKernel.cpp, ``cpu_...``.

    The input is made contiguous in the format that its strides suggest.
    """
    return copies_bytes(tensor(args[0]), tensor(args[0]))


@CPU.workspace(_aten.avg_pool2d_backward.default, _aten._adaptive_avg_pool2d_backward.default)
def _backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """The same files, ``..._backward``.

    Both gradients are taken contiguous in the format that the incoming one's strides suggest.
    """
    grad = tensor(args[0])
    return copies_bytes(grad, grad, tensor(outputs))


@CPU.workspace(
    _aten.adaptive_max_pool2d_backward.default, _aten.adaptive_max_pool3d_backward.default,
    _aten.fractional_max_pool2d_backward.default, _aten.fractional_max_pool3d_backward.default,
    _aten._adaptive_avg_pool3d_backward.default, _aten.avg_pool3d_backward.default,
    _aten.grid_sampler_2d_backward.default,
)  # fmt: skip
def _contiguous_gradient(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/AdaptiveMaxPooling3d.cpp, FractionalMaxPool2d.cpp and the like."""
    grad = tensor(args[0])
    return 0 if grad.is_contiguous() else size_bytes(grad)


@CPU.workspace(_aten.avg_pool3d.default)
def _average_volume(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/AveragePool3d.cpp, ``avg_pool3d_out_cpu``: a contiguous input."""
    x = tensor(args[0])
    return 0 if x.is_contiguous() else size_bytes(x)


@CPU.workspace(
    _aten.max_pool2d_with_indices_backward.default, _aten.max_pool3d_with_indices_backward.default
)
def _max_pool_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """cpu/MaxPoolKernel.cpp, ``max_pool..._backward_kernel_impl``: also the indices."""
    grad, indices = tensor(args[0]), args[7] if len(args) > 7 else kwargs["indices"]
    return copies_bytes(grad, grad, tensor(outputs), tensor(indices))
