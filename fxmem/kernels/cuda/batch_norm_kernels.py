"""PyTorch's own kernels for batch normalization on CUDA: results and buffers.

Source: ``aten/src/ATen/native/cuda/Normalization.cu`` and ``Normalization.cuh``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.arguments import new_bytes, tensor
from fxmem.kernels.cuda.layouts import (
    accumulate_type,
    fits_32_bits,
    is_dense_in,
    reshape_bytes,
    suggest_format,
)
from fxmem.kernels.cuda.reduction import reduce_pair_bytes, spread
from fxmem.kernels.cuda.target import CUDA, is_on_gpu
from fxmem.kernels.tape import Tape
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
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
    chosen = {_choose_one(x) for x in tensors}
    return chosen.pop() if len(chosen) == 1 else _Kernel.GENERAL


def _choose_one(x: Tensor) -> _Kernel:
    if not fits_32_bits(x):
        return _Kernel.GENERAL
    if x.is_contiguous():
        return _Kernel.CHANNELS_LAST if x.stride(1) == 1 else _Kernel.CONTIGUOUS
    if is_dense_in(x, torch.channels_last):
        return _Kernel.CHANNELS_LAST
    return _Kernel.GENERAL


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


@CUDA.kernel(_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default)
def native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    *_factors: float,
) -> Any:
    """``batch_norm_cuda``: the statistics are returned in evaluation, too."""
    if not is_on_gpu(input):
        return NotImplemented
    saved = [input.new_empty(input.shape[1], dtype=accumulate_type(input.dtype)) for _ in "mv"]
    return torch.empty_like(input), saved[0], saved[1]


@CUDA.kernel(_aten._native_batch_norm_legit.no_stats)
def native_batch_norm_without_statistics(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, *factors: float
) -> Any:
    """``_batch_norm_legit_no_stats_cuda``."""
    return native_batch_norm(input, weight, bias, None, None, training, *factors)


@CUDA.workspace(_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default)
def _forward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    return _forward_bytes(tensor(args[0]), args[1:3], args[5] is True)


@CUDA.workspace(_aten._native_batch_norm_legit.no_stats)
def _forward_without_statistics(
    args: Arguments, kwargs: Mapping[str, object], outputs: object
) -> int:
    return _forward_bytes(tensor(args[0]), args[1:3], args[3] is True)


def _forward_bytes(x: Tensor, factors: Sequence[object], training: bool) -> int:
    """``batch_norm_cuda_out``: statistics first; then factors that are not given, as scalars."""
    kernel, wide = _choose(x), accumulate_type(x.dtype)
    statistics = scalars = 0
    if kernel is _Kernel.CHANNELS_LAST:
        statistics = _staging_bytes(x, 4)
    elif kernel is _Kernel.CONTIGUOUS:
        scalars = reshape_bytes(x, x.dim() - 2)
    else:
        others = [dim for dim in range(x.dim()) if dim != 1]
        statistics = reduce_pair_bytes(x, others, False, wide, spread)
        scalars = factors.count(None) * wide.itemsize
    return max(statistics if training else 0, scalars)


@CUDA.kernel(_aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    """``batch_norm_backward_cuda``; also of cuDNN's forward in evaluation."""
    if not is_on_gpu(input):
        return NotImplemented
    grad_input = None
    if output_mask[0]:
        memory_format = torch.contiguous_format
        if not _is_fused(grad_out, input, train, output_mask):
            memory_format = suggest_format(input)
        grad_input = torch.empty_like(input, memory_format=memory_format)
    like = input if weight is None else weight
    factors = [like.new_empty(input.shape[1]) if wanted else None for wanted in output_mask[1:]]
    return grad_input, factors[0], factors[1]


def _is_fused(grad: Tensor, x: Tensor, train: bool, mask: Sequence[bool]) -> bool:
    """Whether one kernel makes all gradients."""
    return (
        (train or mask[1] or mask[2])
        and mask[0]
        and not _has_channels_last(x)
        and fits_32_bits(x)
        and fits_32_bits(grad)
    )


@CUDA.workspace(_aten.native_batch_norm_backward.default)
def _backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    grad, x = tensor(args[0]), tensor(args[1])
    weight, mean, invstd = args[2], args[3], args[6]
    train, mask = args[7] is True, args[9]
    assert isinstance(mask, (list, tuple)) and isinstance(outputs, (list, tuple))
    if _is_fused(grad, x, train, mask):
        return reshape_bytes(x, x.dim() - 2) + reshape_bytes(grad, x.dim() - 2)
    wide = accumulate_type(x.dtype)
    column = x.shape[1] * wide.itemsize
    reduces = train or mask[1] or mask[2]
    tape = Tape()
    if not tensor(invstd).numel():  # cuDNN did not save it
        tape.allocate(column)
        if reduces and tensor(mean).dtype != wide:
            tape.allocate(column)
    if reduces:
        tape.allocate(new_bytes(outputs[1:]) + 2 * column)
        tape.free(tape.allocate(_reduce_bytes(grad, x)))
    tape.allocate(new_bytes(outputs[0]))
    general = _choose(x, grad) is _Kernel.GENERAL
    if mask[0] and train and weight is None and general:
        tape.allocate(wide.itemsize)
    return tape.peak_bytes - new_bytes(outputs)


def _reduce_bytes(grad: Tensor, x: Tensor) -> int:
    """``batch_norm_backward_reduce_cuda``, beside the sums that the input's gradient takes."""
    if fits_32_bits(grad) and _has_channels_last(grad) and _has_channels_last(x):
        return _staging_bytes(x, 2)
    return reshape_bytes(x, x.dim() - 2) + reshape_bytes(grad, x.dim() - 2)
