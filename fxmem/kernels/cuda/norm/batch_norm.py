"""Batch normalization on CUDA: by cuDNN where it can, else by PyTorch's own kernels.

Source: ``aten/src/ATen/native/Normalization.cpp``. The two save different things for backward:
cuDNN's mean and deviation have the type of the weight, the others the type that sums have.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from fxmem.kernels.cuda.gpu import CUDA, is_on_gpu
from fxmem.kernels.cuda.layouts import accumulate_type, fits_32_bits, reshape_bytes
from fxmem.kernels.cuda.reduction.reductions import reduce_pair_bytes, spread
from fxmem.kernels.registry import OperatorCall, as_tensor, storage_bytes
from fxmem.kernels.workspace import PeakTrace, is_dense_in
from fxmem.versions.operators import aten

_CUDNN_TYPES = (torch.float32, torch.float64)
_MOST_IN_TRAINING = 880801
_MOST_IN_EVALUATION = 65535
_MOST_ELEMENTS = 2**31 - 1
_UNMODELLED = "cuDNN chooses its workspace and channels-last reserve at run time"


@CUDA.function(torch.batch_norm)
def batch_norm(input: Tensor, *args: Any) -> Tensor:
    """Normalization.cpp, ``_batch_norm_impl_index``: contiguous operands for cuDNN.

    ``_select_batch_norm_backend`` chooses; the least epsilon of cuDNN is 0 by now.
    """
    weight, bias, mean, variance, training, momentum, eps, _ = args
    given = [statistic is not None for statistic in (mean, variance)]
    takes_cudnn = (
        is_on_gpu(input)
        and weight is not None
        and bias is not None
        and (
            input.dtype in _CUDNN_TYPES
            or (input.dtype == torch.float16 and weight.dtype == torch.float32)
        )
        and weight.dtype != torch.bfloat16
        and (all(given) or (training and not any(given)))
        and input.dim() >= 3
        and 0 < input.shape[0] <= (_MOST_IN_TRAINING if training else _MOST_IN_EVALUATION)
        and 0 < input.numel() < _MOST_ELEMENTS
        and torch.backends.cudnn.enabled
    )
    if not takes_cudnn:
        return torch.batch_norm(input, *args)
    dense = input.contiguous(memory_format=suggest_memory_format(input))
    operands = [None if x is None else x.contiguous() for x in args[:4]]
    outputs = aten.cudnn_batch_norm.default(dense, *operands, training, momentum, eps)
    result: Tensor = outputs[0]
    return result


@CUDA.function(torch.instance_norm)
def instance_norm(input: Tensor, *args: Any) -> Tensor:
    """Normalization.cpp, ``instance_norm``: one image with the channels of all."""
    if not is_on_gpu(input):
        return torch.instance_norm(input, *args)
    batch, channels = input.shape[:2]
    repeated = [None if x is None else x.repeat(batch) for x in args[:4]]
    flat = input.contiguous().view(1, batch * channels, *input.shape[2:])
    result = batch_norm(flat, *repeated, *args[4:])
    for statistic, update in zip(args[2:4], repeated[2:], strict=True):
        if statistic is not None and update is not None:
            statistic.detach().copy_(update.view(batch, channels).mean(0))
    output: Tensor = result.view(input.shape)
    return output


@CUDA.kernel("cudnn_batch_norm")
def cudnn_batch_norm(input: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """aten/src/ATen/native/cudnn/BatchNorm.cpp, ``cudnn_batch_norm``.

    In training it asks cuDNN for the size of the reserve, which nothing else knows: none here.
    """
    training = args[3]
    saved = input.shape[1] if training else 0
    output = torch.empty_like(input, memory_format=suggest_memory_format(input))
    reserve = input.new_empty(0, dtype=torch.uint8)
    return output, weight.new_empty(saved), weight.new_empty(saved), reserve


for _operator in (aten.cudnn_batch_norm.default, aten.cudnn_batch_norm_backward.default):
    CUDA.unmodelled[_operator] = _UNMODELLED


# -- Kernels of PyTorch's own --

# Normalization.cuh
_MAX_THREADS = 512
_ELEMENTS_BY_THREAD = 16
_TILE_WIDTH = 32
_MAX_BLOCKS = 128
_FEW_BLOCKS = 8
_SEMAPHORE_BYTES = 4


class _Kernel(Enum):
    """``Impl``."""

    CONTIGUOUS = "planes"
    CHANNELS_LAST = "channels last"
    GENERAL = "any strides"


def _choose(*tensors: Tensor) -> _Kernel:
    """``batch_norm_choose_impl``."""
    chosen = set()
    for x in tensors:
        kernel = _Kernel.GENERAL
        if fits_32_bits(x) and x.is_contiguous():
            kernel = _Kernel.CHANNELS_LAST if x.stride(1) == 1 else _Kernel.CONTIGUOUS
        elif fits_32_bits(x) and is_dense_in(x, torch.channels_last):
            kernel = _Kernel.CHANNELS_LAST
        chosen.add(kernel)
    return chosen.pop() if len(chosen) == 1 else _Kernel.GENERAL


def _has_channels_last(x: Tensor) -> bool:
    """``batch_norm_use_channels_last_kernels``, which knows volumes as well."""
    return (
        is_dense_in(x, torch.channels_last)
        or is_dense_in(x, torch.channels_last_3d)
        or (x.is_contiguous() and x.stride(1) == 1)
    )


def _staging_bytes(x: Tensor, sums: int) -> int:
    """``flexible_launch_configs`` with cooperation: sums by channel and block, and semaphores."""
    channels = x.shape[1]
    rows = x.numel() // channels
    width = min(_floor_power(channels), _TILE_WIDTH)
    height = min(_floor_power(-(-rows // _ELEMENTS_BY_THREAD)), _MAX_THREADS // width)
    if width * height != _MAX_THREADS:
        width = min(_floor_power(channels), _MAX_THREADS // height)
    blocks = min(-(-rows // (height * _ELEMENTS_BY_THREAD)), _MAX_BLOCKS)
    if blocks < _FEW_BLOCKS:
        return 0
    staged = sums * channels * blocks * accumulate_type(x.dtype).itemsize
    return staged + -(-channels // width) * _SEMAPHORE_BYTES


def _floor_power(number: int) -> int:
    return 1 << max(number.bit_length() - 1, 0)


_FORWARD = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats")


@CUDA.kernel(*_FORWARD)
def native_batch_norm(input: Tensor, *_args: Any) -> Any:
    """``batch_norm_cuda``: the statistics are returned in evaluation, too."""
    if not is_on_gpu(input):
        return NotImplemented
    saved = [input.new_empty(input.shape[1], dtype=accumulate_type(input.dtype)) for _ in "mv"]
    return torch.empty_like(input), saved[0], saved[1]


@CUDA.workspace(*_FORWARD)
def _forward(call: OperatorCall) -> int:
    """``batch_norm_cuda_out``: statistics first; then factors that are not given, as scalars."""
    x, training = call.tensor(0), call.args[-3] is True
    kernel, wide = _choose(x), accumulate_type(x.dtype)
    statistics = scalars = 0
    if kernel is _Kernel.CHANNELS_LAST:
        statistics = _staging_bytes(x, 4)
    elif kernel is _Kernel.CONTIGUOUS:
        scalars = reshape_bytes(x, x.dim() - 2)
    else:
        others = [dim for dim in range(x.dim()) if dim != 1]
        statistics = reduce_pair_bytes(x, others, False, wide, spread)
        scalars = call.args[1:3].count(None) * wide.itemsize
    return max(statistics if training else 0, scalars)


@CUDA.kernel("native_batch_norm_backward")
def native_batch_norm_backward(
    grad_out: Tensor, input: Tensor, weight: Tensor | None, *args: Any
) -> Any:
    """``batch_norm_backward_cuda``; also of cuDNN's forward in evaluation."""
    if not is_on_gpu(input):
        return NotImplemented
    *_, train, _eps, output_mask = args
    grad_input = None
    if output_mask[0]:
        memory_format = torch.contiguous_format
        if not _is_fused(grad_out, input, train, output_mask):
            memory_format = suggest_memory_format(input)
        grad_input = torch.empty_like(input, memory_format=memory_format)
    like = input if weight is None else weight
    factors = [like.new_empty(input.shape[1]) if wanted else None for wanted in output_mask[1:]]
    return grad_input, factors[0], factors[1]


def _is_fused(grad: Tensor, x: Tensor, train: bool, mask: Sequence[bool]) -> bool:
    """Returns whether one kernel makes all gradients."""
    return (
        (train or mask[1] or mask[2])
        and mask[0]
        and not _has_channels_last(x)
        and fits_32_bits(x)
        and fits_32_bits(grad)
    )


@CUDA.workspace("native_batch_norm_backward")
def _backward(call: OperatorCall) -> int:
    grad, x = call.tensor(0), call.tensor(1)
    weight, mean, invstd = call.args[2], call.args[3], call.args[6]
    train, mask = call.args[7] is True, call.args[9]
    if _is_fused(grad, x, train, mask):
        return reshape_bytes(x, x.dim() - 2) + reshape_bytes(grad, x.dim() - 2)
    wide = accumulate_type(x.dtype)
    column = x.shape[1] * wide.itemsize
    reduces = train or mask[1] or mask[2]
    trace = PeakTrace()
    if not as_tensor(invstd).numel():  # cuDNN did not save it
        trace.allocate(column)
        if reduces and as_tensor(mean).dtype != wide:
            trace.allocate(column)
    if reduces:
        trace.allocate(storage_bytes(call.outputs[1:]) + 2 * column)
        trace.free(trace.allocate(_reduce_bytes(grad, x)))
    trace.allocate(storage_bytes(call.outputs[0]))
    general = _choose(x, grad) is _Kernel.GENERAL
    if mask[0] and train and weight is None and general:
        trace.allocate(wide.itemsize)
    return trace.peak_bytes - call.result_bytes


def _reduce_bytes(grad: Tensor, x: Tensor) -> int:
    """``batch_norm_backward_reduce_cuda``, beside the sums that the input's gradient takes."""
    if fits_32_bits(grad) and _has_channels_last(grad) and _has_channels_last(x):
        return _staging_bytes(x, 2)
    return reshape_bytes(x, x.dim() - 2) + reshape_bytes(grad, x.dim() - 2)
