"""Layer, group and root-mean-square normalization on CUDA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from fxmem.kernels.autocast.policies import follow_autocast
from fxmem.kernels.cuda.gpu import CUDA, current_gpu, is_on_gpu
from fxmem.kernels.cuda.layouts import accumulate_type
from fxmem.kernels.cuda.reduction.reductions import Layout, add, reduce_bytes
from fxmem.kernels.registry import OperatorCall
from fxmem.kernels.workspace import PeakTrace, copy_operands, dense_bytes
from fxmem.versions.operators import aten

# aten/src/ATen/native/cuda/layer_norm_kernel.cu, ``LaunchGammaBetaBackwardCUDAKernel``.
_MANY_ROWS = 64 * 1024
_BLOCK_WIDTH = 32
_ROWS_BY_BLOCK = 32
_MAX_GRID = 64 * 1024 // 2


def _saved_shape(x: Tensor, normalized: Sequence[int]) -> tuple[int, ...]:
    """The shape of a statistic: that of the input, with the normalized dimensions of size 1."""
    kept = x.dim() - len(normalized)
    return (*x.shape[:kept], *[1] * len(normalized))


def _dense_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@CUDA.kernel("native_layer_norm")
def native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], *_operands: Any, **_named: Any
) -> Any:
    """layer_norm_kernel.cu, ``layer_norm_cuda``: statistics in the type that sums have."""
    if not is_on_gpu(input):
        return NotImplemented
    shape, wide = _saved_shape(input, normalized_shape), accumulate_type(input.dtype)
    return _dense_like(input), *(input.new_empty(shape, dtype=wide) for _ in range(2))


CUDA.workspace("native_layer_norm")(copy_operands(0, 2, 3))  # ``layer_norm_cuda``


@CUDA.workspace("native_layer_norm_backward", "_fused_rms_norm_backward")
def _backward(call: OperatorCall) -> int:
    """``layer_norm_backward_cuda``, ``_fused_rms_norm_backward_cuda``.

    Contiguous operands, but for the statistics, and partial sums.
    """
    copies = sum(dense_bytes(x) for x in call.args[:7] if isinstance(x, Tensor))
    return copies + _partial_bytes(call.tensor(1), call.args[2], call.outputs[1:])


def _partial_bytes(x: Tensor, normalized: Sequence[int], gradients: Sequence[object]) -> int:
    """``LaunchGammaBetaBackwardCUDAKernel``: sums of 32 rows, where rows are many and short.

    They are added up one gradient after the other, into new tensors that replace the first ones.
    """
    columns = math.prod(normalized)
    rows = x.numel() // max(columns, 1)
    if rows <= _MANY_ROWS or columns // _BLOCK_WIDTH >= current_gpu().multiprocessors // 2:
        return 0
    blocks = min(_MAX_GRID // -(-columns // _BLOCK_WIDTH), -(-rows // _ROWS_BY_BLOCK))
    trace = PeakTrace()
    wanted = [gradient for gradient in gradients if isinstance(gradient, Tensor)]
    width = normalized[-1]
    for gradient in wanted:
        trace.allocate(blocks * width * gradient.element_size())
    for gradient in wanted:
        dtype = gradient.dtype
        partial = Layout((blocks, width), (width, 1), 0, dtype)
        made = trace.allocate(width * dtype.itemsize)
        trace.free(trace.allocate(reduce_bytes(partial, [0], False, dtype, add)))
        trace.free(made)  # the first one goes
    return trace.peak_bytes


@CUDA.function(torch.group_norm)
@follow_autocast(aten.group_norm.default)
def group_norm(input: Tensor, num_groups: int, *operands: Any, **named: Any) -> Tensor:
    """aten/src/ATen/native/group_norm.cpp, ``group_norm``: contiguous whatever the format."""
    dense = input.contiguous() if is_on_gpu(input) else input
    return torch.group_norm(dense, num_groups, *operands, **named)


@CUDA.workspace("native_group_norm")
def _group_norm(call: OperatorCall) -> int:
    """aten/src/ATen/native/cuda/group_norm_kernel.cu: scale and shift by image and channel."""
    x, pixels = call.tensor(0), int(str(call.args[5]))
    if pixels == 1 or (call.args[1] is None and call.args[2] is None):
        return 0
    return 2 * _channels_bytes(x, call.args[3:5])


@CUDA.workspace("native_group_norm_backward")
def _group_norm_backward(call: OperatorCall) -> int:
    """``GroupNormBackwardKernelImplInternal``: two sums and three factors.

    The sums are allocated for one pixel, too, and not used.
    """
    x, weight, mask = call.tensor(1), call.args[4], call.args[9]
    batch, channels, pixels, groups = call.args[5:9]
    by_group = 2 * _channels_bytes(x, (batch, groups)) if mask[0] else 0
    by_channel = 3 if mask[0] and weight is not None and pixels != 1 else 2
    return by_group + by_channel * _channels_bytes(x, (batch, channels))


def _channels_bytes(x: Tensor, sizes: Sequence[object]) -> int:
    return math.prod(int(str(size)) for size in sizes) * accumulate_type(x.dtype).itemsize


class _FusedRmsNorm(torch.autograd.Function):
    """``_fused_rms_norm``, whose autograd formula is for tensors on a GPU alone."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, shape: Sequence[int], eps: float | None
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result, rstd = aten._fused_rms_norm.default(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.shape = shape
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, rstd = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:2])
        backward = aten._fused_rms_norm_backward.default
        with torch._C._AutoDispatchBelowAutograd():
            return *backward(grad, input, ctx.shape, rstd, weight, mask), None, None


@CUDA.function(torch.rms_norm, since=(2, 9))  # pull request 153666; before, single operators
@follow_autocast(aten.rms_norm.default)
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """aten/src/ATen/native/layer_norm.cpp, ``rms_norm_symint``: one kernel, or several."""
    mixed = weight is not None and weight.dtype != input.dtype
    if not is_on_gpu(input) or mixed or suggest_memory_format(input) != torch.contiguous_format:
        return torch.rms_norm(input, normalized_shape, weight, eps)
    apply: Any = _FusedRmsNorm.apply
    result: Tensor = apply(input, weight, list(normalized_shape), eps)
    return result


@CUDA.kernel("_fused_rms_norm")
def fused_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> Any:
    """layer_norm_kernel.cu, ``_fused_rms_norm_cuda``."""
    dtype = accumulate_type(input.dtype)
    rstd = input.new_empty(_saved_shape(input, normalized_shape), dtype=dtype)
    return _dense_like(input), rstd


@CUDA.kernel("_fused_rms_norm_backward")
def fused_rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> Any:
    """layer_norm_kernel.cu, ``_fused_rms_norm_backward_cuda``."""
    operands = zip((input, weight), output_mask, strict=True)
    return tuple(None if x is None or not wanted else _dense_like(x) for x, wanted in operands)


CUDA.workspace("_fused_rms_norm")(copy_operands(0, 2))  # ``_fused_rms_norm_cuda``
