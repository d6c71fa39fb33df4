"""Convolutions on CUDA: copies into the format that the kernels take.

Source: ``aten/src/ATen/native/Convolution.cpp``, ``_convolution`` and ``convolution_backward``;
``cudnn/ConvShared.cpp``, ``cuda/DepthwiseConv2d.cu``. cuDNN's own workspace is its choice: its
heuristics, or a benchmark, choose a plan, and a plan a workspace. Where that was measured
(:func:`_estimate_reordered_bytes`) it is counted; else :func:`limit_cudnn_workspace` says how large
it may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from fxmem.kernels.cuda.convolution.backends import (
    ConvBackend,
    Geometry,
    select_backend,
    suggest_common_format,
)
from fxmem.kernels.cuda.gpu import CUDA, current_gpu, is_on_gpu
from fxmem.kernels.cuda.reduction.reductions import Layout, add, reduce_bytes
from fxmem.kernels.registry import OperatorCall, Workspace, as_tensor, storage_bytes
from fxmem.kernels.workspace import BlockTrace, dense_bytes, is_dense_in, size_bytes
from fxmem.versions.operators import aten

_ALIGNED_CHANNELS = 8
_TENSOR_CORES = {torch.float16: (7, 0), torch.bfloat16: (8, 0), torch.float32: (8, 0)}
"""From which compute capability on tensor cores take a type."""
_BLACKWELL = (10, 0)
_MANY_PIXELS = 64


def _make_geometry(args: Sequence[object], dims: int) -> Geometry:
    """From stride to groups, as the operators' schemas have them."""

    def expand(values: object, fill: int) -> tuple[int, ...]:
        assert isinstance(values, (list, tuple))
        sizes = tuple(values) if len(values) == dims else tuple(values) * dims
        return (fill, *sizes) if dims == 1 else sizes

    stride, padding, dilation, transposed, output_padding, groups = args[:6]
    return Geometry(
        expand(stride, 1),
        expand(padding, 0),
        expand(dilation, 1),
        transposed is True,
        expand(output_padding, 0),
        int(str(groups)),
    )


def _view_4d(x: Tensor) -> Tensor:
    """``view4d``: one spatial dimension becomes two."""
    return x.unsqueeze(2) if x.dim() == 3 else x


def _densify_line(x: Tensor) -> tuple[Tensor, int]:
    """Returns a contiguous input of one dimension as one of two, and the bytes of the copy."""
    if x.dim() != 3:
        return x, 0
    return torch.empty_like(x, memory_format=torch.contiguous_format).unsqueeze(2), dense_bytes(x)


def _choose_format(x: Tensor, weight: Tensor, args: Sequence[object]) -> torch.memory_format:
    """Chooses it for result and gradients: cuDNN's operands decide, other kernels have planes."""
    geometry = _make_geometry(args, x.dim() - 2)
    if x.dim() == 3 or select_backend(x, weight, geometry) is not ConvBackend.CUDNN:
        return torch.contiguous_format
    return suggest_common_format(x, weight)


@CUDA.kernel("convolution")
def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Any:
    """``_convolution``; PyTorch's fake kernel asks which of the CPU's backends would serve."""
    if not is_on_gpu(input):
        return NotImplemented
    result = aten.convolution.default(input, weight, bias, *args)
    return torch.empty_like(result, memory_format=_choose_format(input, weight, args))


@CUDA.kernel("convolution_backward")
def convolution_backward(grad_output: Tensor, input: Tensor, weight: Tensor, *args: Any) -> Any:
    """``convolution_backward``; the gradient is made dense in the input's format first."""
    if not is_on_gpu(input):
        return NotImplemented
    results = aten.convolution_backward.default(grad_output, input, weight, *args)
    memory_format = _choose_format(input, weight, args[1:])
    *gradients, bias = results
    dense = (y if y is None else torch.empty_like(y, memory_format=memory_format)
             for y in gradients)  # fmt: skip
    return (*dense, bias)


@CUDA.workspace("convolution")
def _convolution(call: OperatorCall) -> Workspace:
    """Convolution.cpp, ``_convolution``."""
    geometry = _make_geometry(call.args[3:], call.tensor(0).dim() - 2)
    x, copied = _densify_line(call.tensor(0))
    weight = _view_4d(call.tensor(1))
    backend = select_backend(x, weight, geometry)
    if backend is ConvBackend.EMPTY:
        return copied
    if backend is ConvBackend.COLUMNS:
        return (
            copied
            + dense_bytes(x)
            + dense_bytes(weight)
            + _columns_bytes(x, weight, call.result, geometry)
        )
    if backend is ConvBackend.DEPTHWISE:
        return copied + dense_bytes(x) + dense_bytes(weight)
    memory_format = suggest_common_format(x, weight)
    trace = BlockTrace()
    trace.allocate(copied)
    trace.allocate(dense_bytes(x, memory_format))
    trace.allocate_result()  # ``cudnn_convolution_forward``
    trace.allocate(dense_bytes(weight, memory_format))
    trace.allocate(_estimate_reordered_bytes(x, weight, _view_4d(call.result), geometry))
    return trace.finish()


def _columns_bytes(x: Tensor, weight: Tensor, out: Tensor, geometry: Geometry) -> int:
    """cuda/ConvolutionMM2d.cu and the like: for an image, the input under each kernel position."""
    pixels = math.prod((x if geometry.transposed else out).shape[2:])
    return math.prod(weight.shape[1:]) * pixels * x.element_size()


@CUDA.workspace("convolution_backward")
def _convolution_backward(call: OperatorCall) -> int:
    """Convolution.cpp, ``convolution_backward``: the gradients one after the other."""
    geometry, mask = _make_geometry(call.args[4:], call.tensor(1).dim() - 2), call.args[10]
    grad, weight = _view_4d(call.tensor(0)), _view_4d(call.tensor(2))
    x, copied = _densify_line(call.tensor(1))
    backend = select_backend(x, weight, geometry)
    later = [storage_bytes(call.outputs[at:]) for at in (1, 2)]
    if backend is ConvBackend.CUDNN:
        reordered = _estimate_reordered_bytes(x, weight, grad, geometry)
        inside = _cudnn_backward_bytes(grad, x, weight, mask, later, reordered)
    elif backend is ConvBackend.DEPTHWISE:
        operands = [dense_bytes(grad), mask[1] * dense_bytes(x), mask[0] * dense_bytes(weight)]
        inside = sum(operands) - later[1]
    elif backend is ConvBackend.COLUMNS:
        operands = [dense_bytes(y) for y in (grad, x, weight)]
        inside = sum(operands) + _columns_bytes(x, weight, grad, geometry) - later[1]
    else:
        inside = 0
    dims = [0, *range(2, grad.dim())]
    bias = reduce_bytes(Layout.of(grad), dims, False, grad.dtype, add) if mask[2] else 0
    return copied + max(inside, bias, 0)


def _cudnn_backward_bytes(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: Sequence[object],
    later: Sequence[int],
    reordered_bytes: int,
) -> int:
    """ConvShared.cpp, ``cudnn_convolution_backward``; beyond the gradients that are there by then.

    ``later`` are the bytes of the gradients made after the input's, and after the weight's;
    ``reordered_bytes`` is cuDNN's workspace for each of the two.
    """
    held = 0
    memory_format = suggest_common_format(x, weight)
    if mask[1] and not is_dense_in(x, memory_format):
        held += size_bytes(x)
        x = torch.empty_like(x, memory_format=memory_format)
    if suggest_memory_format(grad) != suggest_memory_format(x):  # ``grad_output_t.to``
        held += size_bytes(grad)
        grad = torch.empty_like(grad, memory_format=suggest_memory_format(x))
    peak = 0
    if mask[0]:
        memory_format = suggest_common_format(grad, weight)
        copies = dense_bytes(grad, memory_format) + dense_bytes(weight, memory_format)
        peak = held + copies + reordered_bytes - later[0]
    if mask[1]:
        memory_format = suggest_common_format(x, grad)
        copies = dense_bytes(grad, memory_format) + dense_bytes(x, memory_format)
        peak = max(peak, held + copies + reordered_bytes - later[1])
    return peak


def _estimate_reordered_bytes(x: Tensor, weight: Tensor, out: Tensor, geometry: Geometry) -> int:
    """cuDNN's workspace for a convolution of planes on tensor cores: its operands reordered.

    Tensor cores take channels last. For planes cuDNN transposes both operands into its workspace,
    and the result back out of it, in half precision with channels padded to a multiple of 8:
    NVIDIA's documentation of cuDNN, legacy API, "Data and Filter Formats". An H200 did so for each
    kernel of 3x3 and more in ResNet-50 and a U-Net, in bfloat16, in float32 as TF32, and where
    groups have several channels (tests/data/cuda; some of 64 channels leave the result out, and the
    weight's gradient takes more: parts of it as floats). So did an unnamed GPU in float16
    (pytorch/pytorch issue 123533, ten widths, to 0.01 GiB) and an RTX 3090 in bfloat16
    (Liger-Kernel's benchmark of multi-token attention, six lengths). The same benchmark on a B200
    shows other workspaces, down to none. A kernel of 1x1 that moves by 1 is a product of matrices,
    of which no operand was moved for 14 x 14 pixels and more, and both for 7 x 7. What nobody
    measured is in :func:`limit_cudnn_workspace` alone. Each operand may stand for its gradient.
    """
    cores_from = _TENSOR_CORES.get(x.dtype)
    if cores_from is None or not cores_from <= current_gpu().capability < _BLACKWELL:
        return 0
    if x.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32:
        return 0
    if x.dim() != 4 or suggest_common_format(x, weight) != torch.contiguous_format:
        return 0
    if weight.shape[1] == 1 and geometry.groups > 1:  # one channel at a time, in planes
        return 0
    is_point = weight.shape[2:] == (1, 1)
    if is_point and geometry.stride == (1, 1) and out[0, 0].numel() >= _MANY_PIXELS:
        return 0
    if x.dtype == torch.float32:
        return size_bytes(x) + size_bytes(out) + (0 if is_point else size_bytes(weight))
    return _pad_channels(x, weight, out)


def limit_cudnn_workspace(x: Tensor, weight: Tensor, out: Tensor) -> int:
    """Returns the most that cuDNN's plan for a convolution is likely to ask for.

    Many plans need none: implicit products in channels last, and direct ones. Plans for tensor
    cores reorder contiguous operands into channels last, with channels padded to the width that
    those take, and plans for the gradient of a weight add up parts of it as floats. Plans by
    Fourier transform, which heuristics choose for large kernels, can take far more. The bytes are
    stated from experience. Each operand may stand for its gradient.
    """
    parts = weight.numel() * 4
    if suggest_common_format(x, weight) != torch.contiguous_format:
        return parts
    return _pad_channels(x, weight, out) + parts


@CUDA.library("convolution")
def _forward_library(call: OperatorCall) -> int:
    return _limit_workspace(call.tensor(0), call.tensor(1), call.result, call.args[3:])


@CUDA.library("convolution_backward")
def _backward_library(call: OperatorCall) -> int:
    """Gradients of input and weight come one after the other, from tensors of the same shapes."""
    grad, x, weight = (as_tensor(arg) for arg in call.args[:3])
    return _limit_workspace(x, weight, grad, call.args[4:])


def _limit_workspace(x: Tensor, weight: Tensor, out: Tensor, args: Sequence[object]) -> int:
    """Returns the most that cuDNN is likely to take above the counted workspace."""
    most = limit_cudnn_workspace(x, weight, out)
    geometry = _make_geometry(args, x.dim() - 2)
    x, weight, out = _view_4d(x), _view_4d(weight), _view_4d(out)
    if select_backend(x, weight, geometry) is not ConvBackend.CUDNN:
        return most
    return most - _estimate_reordered_bytes(x, weight, out, geometry)


def _pad_channels(x: Tensor, weight: Tensor, out: Tensor) -> int:
    """Bytes of a convolution's operands and result, channels padded for tensor cores."""
    total = 0
    for y, channels in ((x, (1,)), (weight, (0, 1)), (out, (1,))):
        sizes = list(y.shape)
        for dim in channels:
            sizes[dim] = -(-sizes[dim] // _ALIGNED_CHANNELS) * _ALIGNED_CHANNELS
        total += math.prod(sizes) * y.element_size()
    return total
