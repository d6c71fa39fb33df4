"""Softmax on CUDA: from float16 to float32 in one kernel, and a product on the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_strides

from fxmem.kernels.arguments import tensor
from fxmem.kernels.cuda.autocast import follow_autocast
from fxmem.kernels.cuda.layouts import dense_bytes
from fxmem.kernels.cuda.target import CUDA, is_on_gpu
from fxmem.kernels.tape import size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten


def _register(function: Callable[..., Any], operator: OpOverload, fused: OpOverload) -> None:
    """aten/src/ATen/native/SoftMax.cpp, ``softmax``: the kernel casts float16, and no other."""

    @CUDA.function(function)
    @follow_autocast(operator)
    def run(input: Tensor, dim: int, dtype: torch.dtype | None = None, **named: Any) -> Any:
        if is_on_gpu(input) and input.dtype == torch.float16 and dtype == torch.float32:
            return fused(input, dim, True)
        return function(input, dim, dtype=dtype, **named)


for _functions, _operator, _fused in (
    ((torch.softmax, Tensor.softmax, torch.special.softmax), _aten.softmax.int, _aten._softmax),
    (
        (torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax),
        _aten.log_softmax.int,
        _aten._log_softmax,
    ),
):
    for _function in _functions:
        _register(_function, _operator, _fused.default)


@CUDA.workspace(_aten._softmax.default, _aten._log_softmax.default)
def _forward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/cuda/SoftMax.cu, ``host_softmax``: a contiguous input."""
    return dense_bytes(tensor(args[0]))


@CUDA.workspace(_aten._log_softmax_backward_data.default)
def _log_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """SoftMax.cu, ``host_softmax_backward``: contiguous operands."""
    return dense_bytes(tensor(args[0])) + dense_bytes(tensor(args[1]))


@CUDA.workspace(_aten._softmax_backward_data.default)
def _backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """SoftMax.cu, ``softmax_backward_cuda_out``: the gradient times the output, contiguous."""
    grad, output = tensor(args[0]), tensor(args[1])
    strides = compute_elementwise_output_strides(grad, output)
    is_contiguous = strides == torch._prims_common.make_contiguous_strides_for(output.shape)
    products = 1 if is_contiguous else 2
    return products * size_bytes(output) + dense_bytes(output)
