"""Convolutions that unfold their input into columns (im2col) and multiply matrices.

Group by group where the backend knows no groups: a copy of a group's channels, a run, and at the
end all groups put together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from fxmem.kernels.cpu.onednn.convolution import Problem, dense_strides, product_bytes
from fxmem.kernels.cpu.reduction import sum_dense_bytes
from fxmem.kernels.registry import CPU, OperatorCall
from fxmem.kernels.workspace import PeakTrace, dense_bytes, size_bytes
from fxmem.versions.operators import aten


@dataclass(frozen=True)
class _Frame:
    """Bytes of the operands of one group of a column backend."""

    batch: int
    input_bytes: int
    weight_bytes: int
    bias_bytes: int
    bias_sum_bytes: int
    output_bytes: int
    columns_bytes: int
    ones_bytes: int
    pointwise: bool


def unfolded_forward_bytes(backend: str, problem: Problem, x: Tensor) -> int | None:
    """Peak of a backend, its output included; None for one that does not unfold.

    ``_convolution``: per group a copy of its channels, a run, and one ``cat`` at the end. A backend
    is named as in PyTorch's ``ConvBackend``.
    """
    if backend not in _BACKWARD:
        return None
    frame, trace, groups = _frame(problem), PeakTrace(), problem.groups
    copied = _group_bytes(x, groups)
    for _ in range(groups):
        trace.allocate(copied)
        _run_forward(backend, frame, trace)
        trace.free(copied)
    if groups > 1:
        trace.allocate(groups * frame.output_bytes)
    return trace.peak_bytes


def unfolded_backward_bytes(
    backend: str, problem: Problem, mask: tuple[bool, ...], grad_output: Tensor, x: Tensor
) -> int | None:
    """Peak of a backend's backward, the gradients included; None for one that does not unfold.

    ``convolution_backward``: per group two copies and a run, then ``cat`` of each gradient. The
    mask tells which are wanted: of the input, the weight and the bias.
    """
    run = _BACKWARD.get(backend)
    if run is None:
        return None
    frame, trace, groups = _frame(problem), PeakTrace(), problem.groups
    copied = _group_bytes(grad_output, groups) + _group_bytes(x, groups)
    for _ in range(groups):
        trace.allocate(copied)
        run(frame, mask, trace)
        trace.free(copied)
    if groups > 1:
        trace.allocate(trace.live_bytes)
    return trace.peak_bytes


def _frame(problem: Problem) -> _Frame:
    """Sizes of one group's work, columns of one sample."""
    groups, itemsize = problem.groups, problem.dtype.itemsize
    inputs, outputs = problem.input_sizes, problem.output_sizes
    taps = math.prod(problem.weight_sizes[2:])
    wide, places = (outputs, inputs) if problem.transposed else (inputs, outputs)
    columns = wide[1] // groups * taps * math.prod(places[2:]) * itemsize
    pointwise = taps == 1 and all(step == 1 for step in problem.stride) and not any(problem.padding)
    if not problem.transposed:  # a backend that takes the groups itself unfolds even such an input
        pointwise = pointwise and inputs[1] // groups == problem.weight_sizes[1]
    # The sum of one group's gradients over all dimensions but the channels.
    sizes = (outputs[0], outputs[1] // groups, *outputs[2:])
    strides = dense_strides(sizes, problem.channels_last and groups == 1)
    dims = (0, *range(2, len(sizes)))
    return _Frame(
        batch=inputs[0],
        input_bytes=product_bytes(inputs, problem.dtype) // groups,
        weight_bytes=product_bytes(problem.weight_sizes, problem.dtype) // groups,
        bias_bytes=outputs[1] // groups * itemsize,
        bias_sum_bytes=sum_dense_bytes(sizes, strides, dims, sizes[1], problem.dtype),
        output_bytes=product_bytes(outputs, problem.dtype) // groups,
        columns_bytes=columns,
        ones_bytes=math.prod(outputs[2:]) * itemsize if problem.bias_dtype else 0,
        pointwise=pointwise,
    )


def _group_bytes(x: Tensor, groups: int) -> int:
    """Bytes of one group's channels, if ``subtensor`` (narrow, contiguous) has to copy them."""
    return dense_bytes(x.narrow(1, 0, x.shape[1] // groups)) if groups > 1 else 0


def _run(*sizes_bytes: int, trace: PeakTrace) -> None:
    for size in sizes_bytes:
        trace.allocate(size)
    trace.free(*sizes_bytes)


def _run_forward(backend: str, frame: _Frame, trace: PeakTrace) -> None:
    """ConvolutionMM2d.cpp, NaiveDilatedConvolution.cpp, NNPACK.cpp and the like.

    Columns of the batch, or of one sample where the kernel is dilated. NNPACK takes zeros for a
    missing bias. A transposed one of 3 dimensions starts from ``empty_like(input)``, of which
    ``resize_`` keeps the storage where it is large enough.
    """
    inside = {
        "SlowDilated2d": (frame.columns_bytes,),
        "SlowDilated3d": (frame.columns_bytes,),
        "SlowTranspose2d": (frame.batch * frame.columns_bytes,),
        "SlowTranspose3d": (frame.columns_bytes, frame.ones_bytes),
        "NnpackSpatial": (0 if frame.ones_bytes else frame.bias_bytes,),
    }.get(backend, (0 if frame.pointwise else frame.batch * frame.columns_bytes,))
    started = 0
    if backend == "SlowTranspose3d":
        started = trace.allocate(frame.input_bytes)
    if frame.output_bytes > started:
        trace.allocate(frame.output_bytes)
        trace.free(started)
    _run(*inside, trace=trace)


def _slow_2d_backward(frame: _Frame, mask: tuple[bool, ...], trace: PeakTrace) -> None:
    """ConvolutionMM2d.cpp, ``slow_conv2d_backward_out_cpu``: columns for the weight only.

    The buffer for the input's gradient is a plain C++ array per thread.
    """
    trace.allocate(frame.input_bytes * mask[0] + frame.bias_bytes * mask[2])
    _run(frame.bias_sum_bytes * mask[2], trace=trace)
    if mask[1]:
        trace.allocate(frame.weight_bytes)
        _run(0 if frame.pointwise else frame.batch * frame.columns_bytes, trace=trace)


def _slow_dilated_backward(frame: _Frame, mask: tuple[bool, ...], trace: PeakTrace) -> None:
    """As forward; the bias's gradient is summed sample by sample into a temporary."""
    gradients = frame.input_bytes * mask[0] + frame.weight_bytes * mask[1]
    trace.allocate(gradients + frame.bias_bytes * mask[2])
    _run(frame.columns_bytes if mask[0] or mask[1] else 0, frame.bias_bytes * mask[2], trace=trace)


def _columns_twice(is_3d: bool, frame: _Frame, mask: tuple[bool, ...], trace: PeakTrace) -> None:
    """``slow_conv_transpose2d_backward_out_cpu_template``, ``..._acc_grad_parameters_cpu``;
    ConvolutionMM3d.cpp, whose columns are the batch's, for the input's gradient even of one point.
    """
    columns = frame.columns_bytes * (frame.batch if is_3d else 1)
    if mask[0]:
        trace.allocate(frame.input_bytes)
        _run(0 if frame.pointwise and not is_3d else columns, trace=trace)
    trace.allocate(frame.bias_bytes * mask[2])
    _run(frame.bias_sum_bytes * mask[2], trace=trace)
    if mask[1]:
        trace.allocate(frame.weight_bytes)
        _run(0 if frame.pointwise else columns, trace=trace)


def _slow_transpose_3d_backward(frame: _Frame, mask: tuple[bool, ...], trace: PeakTrace) -> None:
    """As in 2d, but the bias's gradient is summed beside the columns."""
    columns = 0 if frame.pointwise else frame.columns_bytes
    if mask[0]:
        trace.allocate(frame.input_bytes)
        _run(columns, trace=trace)
    trace.allocate(frame.weight_bytes * mask[1] + frame.bias_bytes * mask[2])
    if mask[1] or mask[2]:
        _run(columns, frame.bias_sum_bytes * mask[2], trace=trace)


_BACKWARD: dict[str, Callable[[_Frame, tuple[bool, ...], PeakTrace], None]] = {
    "Slow2d": _slow_2d_backward,
    "SlowDilated2d": _slow_dilated_backward,
    "SlowTranspose2d": functools.partial(_columns_twice, False),
    "Slow3d": functools.partial(_columns_twice, True),
    "SlowDilated3d": _slow_dilated_backward,
    "SlowTranspose3d": _slow_transpose_3d_backward,
    "NnpackSpatial": _slow_dilated_backward,
}


# -- Columns as results --

_im2col, _col2im = aten.im2col.default, aten.col2im.default


def _resize(x: Tensor, result: Tensor) -> Tensor:
    """``empty_like(x)``, resized: the storage does not shrink."""
    if x.numel() <= result.numel():
        return result
    return torch.empty_like(x).as_strided(result.shape, make_contiguous_strides_for(result.shape))


@CPU.kernel(_im2col)
def im2col(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """aten/src/ATen/native/Im2Col.cpp, ``im2col_cpu``."""
    return _resize(x, _im2col(x, *args, **kwargs))


@CPU.kernel(_col2im)
def col2im(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """aten/src/ATen/native/Col2Im.cpp, ``col2im_cpu``."""
    return _resize(x, _col2im(x, *args, **kwargs))


@CPU.workspace(_im2col, _col2im)
def _columns(call: OperatorCall) -> int:
    """Im2Col.cpp and Col2Im.cpp: a contiguous input, and memory before it is made larger."""
    x = call.tensor(0)
    trace = PeakTrace()
    trace.allocate(size_bytes(x))
    trace.allocate(dense_bytes(x))
    if call.result_bytes > size_bytes(x):
        trace.allocate(call.result_bytes)
    return trace.peak_bytes - call.result_bytes
