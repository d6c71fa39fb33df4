"""Batch, layer and group normalization on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from fxmem.kernels.cpu.copying import copy_contiguous
from fxmem.kernels.cpu.reduction import sum_bytes
from fxmem.kernels.registry import CPU, OperatorCall
from fxmem.kernels.workspace import PeakTrace, copy_operands, size_bytes

# aten/src/ATen/native/cpu/group_norm_kernel.cpp: below it, one buffer per sample is enough.
_FEATURE_MAP_THRESHOLD, _BACKWARD_MAP_THRESHOLD = 1024, 2048


def _accumulate_bytes(dtype: torch.dtype) -> int:
    """Element size of ``opmath_type`` on the CPU: float for reduced types."""
    return max(dtype.itemsize, 4)


def _dense_format(x: Tensor) -> torch.memory_format | None:
    if x.is_contiguous():
        return torch.contiguous_format
    for dims, last in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=last):
            return last
    return None


def _is_channels_last_kernel(x: Tensor, dense: torch.memory_format) -> bool:
    """cpu/batch_norm_kernel.cpp: an image of one pixel counts as channels last."""
    return dense is not torch.contiguous_format or x.numel() == x.shape[0] * x.shape[1]


_BATCH_NORM = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats")


@CPU.kernel(*_BATCH_NORM)
def batch_norm(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """aten/src/ATen/native/Normalization.cpp, ``batch_norm_cpu``.

    PyTorch's fake kernel keeps the strides of an input that is dense in another order, which the
    real one does not; and parameters in float32 beside a low-precision input have such statistics.
    """
    *given, training, _momentum, _eps = args
    plain = torch.contiguous_format
    memory_format = plain if x.is_contiguous() else suggest_memory_format(x)
    output = torch.empty_like(x, memory_format=memory_format)
    dtype = next((t.dtype for t in given if t is not None), x.dtype)
    channels = x.shape[1] if training else 0
    return output, x.new_empty(channels, dtype=dtype), x.new_empty(channels, dtype=dtype)


@CPU.workspace(*_BATCH_NORM)
def _batch_norm(call: OperatorCall) -> int:
    """aten/src/ATen/native/Normalization.cpp, ``batch_norm_cpu``.

    While statistics are collected: mean and sum of squares in the parameters' type, and per
    thread a sum if the channels are innermost; then, for the transformation, alpha and beta.
    """
    x, saved, training = call.tensor(0), call.get_result(1), call.args[-3] is True
    dense = _dense_format(x)
    if dense is None:
        return 0
    channels, wide = x.shape[1], _accumulate_bytes(x.dtype)
    transform = 2 * channels * wide
    if not training:
        return transform
    statistics = 2 * channels * saved.element_size()
    threads = torch.get_num_threads()
    if _is_channels_last_kernel(x, dense) and (
        x.dtype.itemsize < wide or x.numel() // channels > threads
    ):
        statistics += threads * channels * wide
    return max(statistics, transform)


@CPU.workspace("native_batch_norm_backward")
def _batch_norm_backward(call: OperatorCall) -> int:
    """Normalization.cpp, ``batch_norm_backward_cpu_template``; cpu/batch_norm_kernel.cpp.

    The gradient of the input is allocated twice where both tensors are dense in one format: the
    second replaces the first. Channels-last kernels reduce into a buffer per thread.
    """
    grad, x, mask = call.tensor(0), call.tensor(1), call.args[9]
    channels, wide = x.shape[1], _accumulate_bytes(x.dtype)
    dense = _dense_format(x)
    if dense is None or not grad.is_contiguous(memory_format=dense):
        others = [dim for dim in range(grad.dim()) if dim != 1]
        summed = torch.float32 if grad.dtype == torch.float16 else grad.dtype
        return channels * summed.itemsize + sum_bytes(grad, others, channels, summed)
    trace = PeakTrace()
    if mask[0]:
        trace.free(trace.allocate(size_bytes(x)))
    if _is_channels_last_kernel(x, dense):
        buffer = 2 * torch.get_num_threads() * channels * wide
        if x.dtype.itemsize < wide:
            buffer += 3 * channels * wide
        elif call.args[7] is not True:
            buffer += channels * wide
        trace.allocate(buffer)
    return trace.peak_bytes


def _statistics_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    """aten/src/ATen/native/cpu/mixed_data_type.h, ``is_mixed_type`` and ``param_scalar_type``."""
    parameter = bias if weight is None else weight
    return x.dtype if parameter is None or parameter.dtype == x.dtype else torch.float32


@CPU.kernel("native_layer_norm")
def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """layer_norm.cpp, ``layer_norm_cpu``: statistics in float32 where the parameters are."""
    rows = [*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)]
    dtype = _statistics_dtype(x, weight, bias)
    return x.new_empty(x.shape), x.new_empty(rows, dtype=dtype), x.new_empty(rows, dtype=dtype)


@CPU.kernel("native_group_norm")
def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """aten/src/ATen/native/group_norm.cpp, ``native_group_norm``: statistics as above."""
    batch, _channels, _pixels, groups, _eps = sizes
    dtype = _statistics_dtype(x, weight, bias)
    y = torch.empty_like(x, memory_format=suggest_memory_format(x))
    means, scales = (x.new_empty((batch, groups), dtype=dtype) for _ in range(2))
    return y, means, scales


# aten/src/ATen/native/layer_norm.cpp, ``layer_norm_cpu``
CPU.workspace("native_layer_norm")(copy_operands(0))


@CPU.workspace("native_layer_norm_backward")
def _layer_norm_backward(call: OperatorCall) -> int:
    """layer_norm.cpp, ``layer_norm_backward_cpu``; cpu/layer_norm_kernel.cpp.

    Contiguous operands, and per thread a row for each of the two parameters' gradients.
    """
    grad, x, shape, mask = call.tensor(0), call.tensor(1), call.args[2], call.args[7]
    copies = sum(size_bytes(operand) for operand in (grad, x) if not operand.is_contiguous())
    if not (mask[1] or mask[2]):
        return copies
    row = x.element_size()
    for size in shape:
        row *= int(size)
    return copies + 2 * torch.get_num_threads() * row


@CPU.workspace("native_group_norm")
def _group_norm(call: OperatorCall) -> int:
    """aten/src/ATen/native/cpu/group_norm_kernel.cpp, ``GroupNormKernelImpl``.

    Channels last: sums by channel for each sample, and for large maps for each thread as well.
    """
    x = call.tensor(0)
    batch, channels, pixels, groups = (int(str(value)) for value in call.args[3:7])
    if suggest_memory_format(x) == torch.contiguous_format:
        return 0
    wide = _accumulate_bytes(x.dtype)
    if pixels < _FEATURE_MAP_THRESHOLD:
        return batch * 2 * channels * wide
    return (torch.get_num_threads() * batch * 2 * channels + batch * 2 * groups) * wide


@CPU.workspace("native_group_norm_backward")
def _group_norm_backward(call: OperatorCall) -> int:
    """group_norm_kernel.cpp, ``GroupNormBackwardKernelImpl``: two sums by sample and channel.

    Large maps with channels last: those for each thread as well, and sums by group.
    """
    x = call.tensor(1)
    batch, channels, pixels, groups = (int(str(value)) for value in call.args[5:9])
    sums = 2 * batch * channels
    if suggest_memory_format(x) != torch.contiguous_format and pixels >= _BACKWARD_MAP_THRESHOLD:
        sums += torch.get_num_threads() * sums + 2 * batch * groups
    return sums * _accumulate_bytes(x.dtype)


@CPU.workspace("_weight_norm_interface")
def _weight_norm(call: OperatorCall) -> int:
    """aten/src/ATen/native/cpu/WeightNormKernel.cpp, ``weight_norm_last_dim_kernel``.

    Sums of squares of the innermost slices, for each thread; none of the outermost ones.
    """
    return torch.get_num_threads() * _slices_bytes(call.tensor(0), call.get(2, "dim"))


@CPU.workspace("_weight_norm_interface_backward")
def _weight_norm_backward(call: OperatorCall) -> int:
    """WeightNormKernel.cpp, ``weight_norm_backward_last_dim_kernel``: no fewer than three rows."""
    return max(3, torch.get_num_threads()) * _slices_bytes(call.tensor(1), call.args[4])


def _slices_bytes(weight: Tensor, dim: object) -> int:
    return weight.shape[-1] * _accumulate_bytes(weight.dtype) if dim else 0


# aten/src/ATen/native/SoftMax.cpp, ``softmax_cpu_out``, ``softmax_backward_cpu_out``
CPU.workspace("_softmax", "_log_softmax")(copy_contiguous(0))
CPU.workspace("_softmax_backward_data", "_log_softmax_backward_data")(copy_contiguous(0, 1))


@CPU.workspace("_safe_softmax")
def _safe_softmax(call: OperatorCall) -> int:
    """aten/src/ATen/native/transformers/attention.cpp, ``_safe_softmax``.

    After the softmax: which elements are -inf, which rows are all so, and a zero scalar.
    """
    x, dim = call.tensor(0), int(str(call.args[1]))
    out = call.result
    rows = x.numel() // max(1, x.shape[dim] if x.dim() else 1)
    changed = 0 if x.dtype == out.dtype else size_bytes(out)
    copied = 0 if x.is_contiguous() or changed else size_bytes(x)
    return max(changed, copied, x.numel() + rows + out.element_size())


# -- Gradients that nobody wants --


@CPU.kernel("native_batch_norm_backward")
def batch_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor | None, *args: Any
) -> tuple[Any, ...]:
    """aten/src/ATen/native/Normalization.cpp, ``batch_norm_backward_cpu_template``.

    Not PyTorch's fake kernel without the unwanted: that one decomposes into some thirty operators.
    """
    dtype = x.dtype if weight is None else weight.dtype
    channels, output_mask = x.shape[1], args[-1]
    return (
        torch.empty_like(x, memory_format=suggest_memory_format(x)) if output_mask[0] else None,
        x.new_empty(channels, dtype=dtype) if output_mask[1] else None,
        x.new_empty(channels, dtype=dtype) if output_mask[2] else None,
    )
