"""Results that real kernels lay out otherwise than PyTorch's fake ones, on any device.

The strides of a result decide whether a later ``view`` copies it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides

from fxmem.kernels.registry import ANY


@ANY.kernel(
    "elu_backward",
    "hardsigmoid_backward",
    "hardswish_backward",
    "hardtanh_backward",
    "logit_backward",
    "softplus_backward",
)
def activation_backward(grad_output: Tensor, *operands: object, **_named: object) -> Tensor:
    """aten/src/ATen/native/Activation.cpp and UnaryOps.cpp: an iterator, the gradient first.

    PyTorch's fake kernels are decompositions, which begin with a comparison of the input.
    Source of the strides: ``TensorIterator`` (aten/src/ATen/TensorIterator.cpp).
    """
    tensors = (grad_output, *(x for x in operands if isinstance(x, Tensor)))
    strides = compute_elementwise_output_strides(*tensors)
    return grad_output.new_empty_strided(grad_output.shape, strides)


@ANY.kernel("_log_softmax_backward_data")
def log_softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """SoftMax.cpp, ``TORCH_META_FUNC(log_softmax_backward_data)``: contiguous always."""
    return grad_output.new_empty(grad_output.shape, dtype=input_dtype)


@ANY.kernel("native_layer_norm_backward")
def layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """layer_norm.cpp, ``layer_norm_backward_cpu``; layer_norm_kernel.cu: contiguous."""
    operands = zip((input, weight, bias), output_mask, strict=True)
    return tuple(
        None if x is None or not wanted else x.new_empty(x.shape) for x, wanted in operands
    )
