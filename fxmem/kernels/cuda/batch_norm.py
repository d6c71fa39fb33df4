"""Batch normalization on CUDA: by cuDNN where it can, else by PyTorch's own kernels.

Source: ``aten/src/ATen/native/Normalization.cpp``. The two save different things for backward:
cuDNN's mean and deviation have the type of the weight, the others the type that sums have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxmem.kernels.cuda.layouts import suggest_format
from fxmem.kernels.cuda.target import CUDA, is_on_gpu

_aten = torch.ops.aten
_CUDNN_TYPES = (torch.float32, torch.float64)
_MOST_IN_TRAINING = 880801
_MOST_IN_EVALUATION = 65535
_MOST_ELEMENTS = 2**31 - 1
_UNMODELLED = "cuDNN's workspace, and its reserve for channels last: cuDNN alone knows"


def _takes_cudnn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor | None, Tensor | None],
    training: bool,
) -> bool:
    """``_select_batch_norm_backend``; the least epsilon of cuDNN is 0 by now."""
    if not is_on_gpu(x) or weight is None or bias is None:
        return False
    half = x.dtype == torch.float16 and weight.dtype == torch.float32
    given = [statistic is not None for statistic in running]
    return (
        (half or x.dtype in _CUDNN_TYPES)
        and weight.dtype != torch.bfloat16
        and (all(given) or (training and not any(given)))
        and x.dim() >= 3
        and 0 < x.shape[0] <= (_MOST_IN_TRAINING if training else _MOST_IN_EVALUATION)
        and 0 < x.numel() < _MOST_ELEMENTS
        and torch.backends.cudnn.enabled
    )


@CUDA.function(torch.batch_norm)
def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Normalization.cpp, ``_batch_norm_impl_index``: contiguous operands for cuDNN."""
    running = (running_mean, running_var)
    if not _takes_cudnn(input, weight, bias, running, training):
        return torch.batch_norm(
            input, weight, bias, *running, training, momentum, eps, cudnn_enabled
        )
    assert weight is not None and bias is not None
    dense = input.contiguous(memory_format=suggest_format(input))
    factors = (weight.contiguous(), bias.contiguous())
    statistics = [None if x is None else x.contiguous() for x in running]
    operands = (*factors, *statistics)
    outputs = _aten.cudnn_batch_norm.default(dense, *operands, training, momentum, eps)
    result: Tensor = outputs[0]
    return result


@CUDA.function(torch.instance_norm)
def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Normalization.cpp, ``instance_norm``: one image with the channels of all."""
    operands = (weight, bias, running_mean, running_var)
    if not is_on_gpu(input):
        return torch.instance_norm(input, *operands, use_input_stats, momentum, eps, cudnn_enabled)
    batch, channels = input.shape[:2]
    repeated = [None if x is None else x.repeat(batch) for x in operands]
    flat = input.contiguous().view(1, batch * channels, *input.shape[2:])
    result = batch_norm(flat, *repeated, use_input_stats, momentum, eps, cudnn_enabled)
    for statistic, update in zip(operands[2:], repeated[2:], strict=True):
        if statistic is not None and update is not None:
            statistic.detach().copy_(update.view(batch, channels).mean(0))
    output: Tensor = result.view(input.shape)
    return output


@CUDA.kernel(_aten.cudnn_batch_norm.default)
def cudnn_batch_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    *_factors: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """aten/src/ATen/native/cudnn/BatchNorm.cpp, ``cudnn_batch_norm``.

    In training it asks cuDNN for the size of the reserve, which nothing else knows: none here.
    """
    saved = input.shape[1] if training else 0
    output = torch.empty_like(input, memory_format=suggest_format(input))
    reserve = input.new_empty(0, dtype=torch.uint8)
    return output, weight.new_empty(saved), weight.new_empty(saved), reserve


for _operator in (_aten.cudnn_batch_norm.default, _aten.cudnn_batch_norm_backward.default):
    CUDA.unmodelled[_operator] = _UNMODELLED
