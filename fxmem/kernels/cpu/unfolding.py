"""Convolutions that unfold their input into columns (im2col) and multiply matrices.

Group by group where the backend knows no groups: a copy of a group's channels, a run, and at the
end all groups put together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fxmem.kernels.cpu.mkldnn_convolution import Problem, Sizes, dense_strides, product_bytes
from fxmem.kernels.cpu.reduction import sum_dense_bytes
from fxmem.kernels.tape import Tape


@dataclass(frozen=True)
class _Frame:
    """Bytes of what one group of a column backend works on."""

    batch: int
    input_bytes: int
    weight_bytes: int
    bias_bytes: int
    bias_sum_bytes: int
    output_bytes: int
    columns_bytes: int
    ones_bytes: int
    pointwise: bool


def unfolded_forward_bytes(backend: str, problem: Problem) -> int | None:
    """Peak of a backend, its output included; None for one that does not unfold.

    Args:
        backend: Its name among PyTorch's ``ConvBackend``.
        problem: The convolution.
    """
    run = _FORWARD.get(backend)
    return None if run is None else _grouped_forward_bytes(problem, run)


def unfolded_backward_bytes(
    backend: str, problem: Problem, mask: tuple[bool, ...], grad_output: tuple[Sizes, Sizes]
) -> int | None:
    """Peak of a backend's backward, the gradients included; None for one that does not unfold.

    Args:
        backend: Its name among PyTorch's ``ConvBackend``.
        problem: The convolution.
        mask: Which gradients are wanted: of the input, the weight and the bias.
        grad_output: Sizes and strides of the gradient that comes in.
    """
    run = _BACKWARD.get(backend)
    return None if run is None else _grouped_backward_bytes(problem, mask, grad_output, run)


def is_dense(view: tuple[Sizes, Sizes], channels_last: bool) -> bool:
    """``Tensor.is_contiguous(memory_format)``: strides of dimensions of size 1 are free.

    Args:
        view: Sizes and strides.
        channels_last: Whether the format is that, or contiguous.
    """
    sizes, strides = view
    wanted = dense_strides(sizes, channels_last)
    return 0 in sizes or all(
        size == 1 or have == want for size, have, want in zip(sizes, strides, wanted, strict=True)
    )


def _frame(problem: Problem) -> _Frame:
    """Sizes of one group's work, columns of one sample."""
    groups, itemsize = problem.groups, problem.dtype.itemsize
    inputs, outputs = problem.input_sizes, problem.output_sizes
    taps = math.prod(problem.weight_sizes[2:])
    wide, places = (outputs, inputs) if problem.transposed else (inputs, outputs)
    columns = wide[1] // groups * taps * math.prod(places[2:]) * itemsize
    pointwise = taps == 1 and all(step == 1 for step in problem.stride) and not any(problem.padding)
    if not problem.transposed:  # what takes the groups itself unfolds even such an input
        pointwise = pointwise and inputs[1] // groups == problem.weight_sizes[1]
    return _Frame(
        batch=inputs[0],
        input_bytes=product_bytes(inputs, problem.dtype) // groups,
        weight_bytes=product_bytes(problem.weight_sizes, problem.dtype) // groups,
        bias_bytes=outputs[1] // groups * itemsize,
        bias_sum_bytes=_bias_sum_bytes(problem),
        output_bytes=product_bytes(outputs, problem.dtype) // groups,
        columns_bytes=columns,
        ones_bytes=math.prod(outputs[2:]) * itemsize if problem.bias_dtype else 0,
        pointwise=pointwise,
    )


def _bias_sum_bytes(problem: Problem) -> int:
    """What the sum of one group's gradients takes, over all but the channels."""
    batch, channels, *places = problem.output_sizes
    sizes = (batch, channels // problem.groups, *places)
    strides = dense_strides(sizes, problem.channels_last and problem.groups == 1)
    dims = (0, *range(2, len(sizes)))
    return sum_dense_bytes(sizes, strides, dims, sizes[1], problem.dtype)


def _grouped_forward_bytes(problem: Problem, run: Callable[[_Frame, Tape], None]) -> int:
    """``_convolution``: per group a copy of its channels, a run, and one ``cat`` at the end."""
    frame, tape, groups = _frame(problem), Tape(), problem.groups
    copied = _subtensor_bytes(_dense_input(problem), problem)
    for _ in range(groups):
        tape.allocate(copied)
        run(frame, tape)
        tape.free(copied)
    if groups > 1:
        tape.allocate(groups * frame.output_bytes)
    return tape.peak_bytes


def _grouped_backward_bytes(
    problem: Problem,
    mask: tuple[bool, ...],
    grad_output: tuple[Sizes, Sizes],
    run: Callable[[_Frame, tuple[bool, ...], Tape], None],
) -> int:
    """``convolution_backward``: per group two copies and a run, then ``cat`` of each gradient."""
    frame, tape, groups = _frame(problem), Tape(), problem.groups
    copied = _subtensor_bytes(grad_output, problem)
    copied += _subtensor_bytes(_dense_input(problem), problem)
    for _ in range(groups):
        tape.allocate(copied)
        run(frame, mask, tape)
        tape.free(copied)
    if groups > 1:
        tape.allocate(tape.live_bytes)
    return tape.peak_bytes


def _dense_input(problem: Problem) -> tuple[Sizes, Sizes]:
    """Sizes and strides of the input in the backend's memory format."""
    return problem.input_sizes, dense_strides(problem.input_sizes, problem.channels_last)


def _subtensor_bytes(view: tuple[Sizes, Sizes], problem: Problem) -> int:
    """Bytes of one group's channels, if ``subtensor`` (narrow, contiguous) has to copy them."""
    sizes, strides = view
    part = (sizes[0], sizes[1] // problem.groups, *sizes[2:])
    if problem.groups == 1 or is_dense((part, strides), False):
        return 0
    return product_bytes(part, problem.dtype)


def _run(*sizes_bytes: int, tape: Tape) -> None:
    """Temporaries that live together and end together."""
    for size in sizes_bytes:
        tape.allocate(size)
    tape.free(*sizes_bytes)


def _slow_2d(frame: _Frame, tape: Tape) -> None:
    """ConvolutionMM2d.cpp, ``slow_conv2d_forward_out_cpu``: columns of the whole batch."""
    columns = 0 if frame.pointwise else frame.batch * frame.columns_bytes
    tape.allocate(frame.output_bytes)
    _run(columns, tape=tape)


def _slow_2d_backward(frame: _Frame, mask: tuple[bool, ...], tape: Tape) -> None:
    """ConvolutionMM2d.cpp, ``slow_conv2d_backward_out_cpu``: columns for the weight only.

    The buffer for the input's gradient is a plain C++ array per thread.
    """
    tape.allocate(frame.input_bytes * mask[0] + frame.bias_bytes * mask[2])
    _run(frame.bias_sum_bytes * mask[2], tape=tape)
    if mask[1]:
        tape.allocate(frame.weight_bytes)
        _run(0 if frame.pointwise else frame.batch * frame.columns_bytes, tape=tape)


def _slow_dilated(frame: _Frame, tape: Tape) -> None:
    """NaiveDilatedConvolution.cpp, ``slow_conv_dilated_all_cpu_template``: one sample."""
    tape.allocate(frame.output_bytes)
    _run(frame.columns_bytes, tape=tape)


def _slow_dilated_backward(frame: _Frame, mask: tuple[bool, ...], tape: Tape) -> None:
    """As forward; the bias's gradient is summed sample by sample into a temporary."""
    gradients = frame.input_bytes * mask[0] + frame.weight_bytes * mask[1]
    tape.allocate(gradients + frame.bias_bytes * mask[2])
    _run(frame.columns_bytes if mask[0] or mask[1] else 0, frame.bias_bytes * mask[2], tape=tape)


def _slow_transpose_2d(frame: _Frame, tape: Tape) -> None:
    """NaiveConvolutionTranspose2d.cpp, ``slow_conv_transpose2d_out_cpu_template``: the batch."""
    tape.allocate(frame.output_bytes)
    _run(frame.batch * frame.columns_bytes, tape=tape)


def _slow_transpose_2d_backward(frame: _Frame, mask: tuple[bool, ...], tape: Tape) -> None:
    """``slow_conv_transpose2d_backward_out_cpu_template`` and ``..._acc_grad_parameters_cpu``."""
    columns = 0 if frame.pointwise else frame.columns_bytes
    if mask[0]:
        tape.allocate(frame.input_bytes)
        _run(columns, tape=tape)
    tape.allocate(frame.bias_bytes * mask[2])
    _run(frame.bias_sum_bytes * mask[2], tape=tape)
    if mask[1]:
        tape.allocate(frame.weight_bytes)
        _run(columns, tape=tape)


def _slow_3d(frame: _Frame, tape: Tape) -> None:
    """ConvolutionMM3d.cpp, ``slow_conv3d_forward_out_cpu``: columns of the whole batch."""
    _slow_2d(frame, tape)


def _slow_3d_backward(frame: _Frame, mask: tuple[bool, ...], tape: Tape) -> None:
    """ConvolutionMM3d.cpp: columns for the input's gradient, even of one point, then again for
    the weight's."""
    columns = frame.batch * frame.columns_bytes
    if mask[0]:
        tape.allocate(frame.input_bytes)
        _run(columns, tape=tape)
    tape.allocate(frame.bias_bytes * mask[2])
    _run(frame.bias_sum_bytes * mask[2], tape=tape)
    if mask[1]:
        tape.allocate(frame.weight_bytes)
        _run(0 if frame.pointwise else columns, tape=tape)


def _slow_transpose_3d(frame: _Frame, tape: Tape) -> None:
    """NaiveConvolutionTranspose3d.cpp: the output starts as ``empty_like(input)``.

    ``resize_`` keeps that storage where it is large enough.
    """
    started = tape.allocate(frame.input_bytes)
    if frame.output_bytes > frame.input_bytes:
        tape.allocate(frame.output_bytes)
        tape.free(started)
    _run(frame.columns_bytes, frame.ones_bytes, tape=tape)


def _slow_transpose_3d_backward(frame: _Frame, mask: tuple[bool, ...], tape: Tape) -> None:
    """As in 2d, but the bias's gradient is summed beside the columns."""
    columns = 0 if frame.pointwise else frame.columns_bytes
    if mask[0]:
        tape.allocate(frame.input_bytes)
        _run(columns, tape=tape)
    tape.allocate(frame.weight_bytes * mask[1] + frame.bias_bytes * mask[2])
    if mask[1] or mask[2]:
        _run(columns, frame.bias_sum_bytes * mask[2], tape=tape)


def _nnpack(frame: _Frame, tape: Tape) -> None:
    """NNPACK.cpp, ``_nnpack_spatial_convolution``: zeros for a missing bias."""
    tape.allocate(frame.output_bytes)
    _run(0 if frame.ones_bytes else frame.bias_bytes, tape=tape)


_FORWARD: dict[str, Callable[[_Frame, Tape], None]] = {
    "Slow2d": _slow_2d,
    "SlowDilated2d": _slow_dilated,
    "SlowTranspose2d": _slow_transpose_2d,
    "Slow3d": _slow_3d,
    "SlowDilated3d": _slow_dilated,
    "SlowTranspose3d": _slow_transpose_3d,
    "NnpackSpatial": _nnpack,
}
_BACKWARD: dict[str, Callable[[_Frame, tuple[bool, ...], Tape], None]] = {
    "Slow2d": _slow_2d_backward,
    "SlowDilated2d": _slow_dilated_backward,
    "SlowTranspose2d": _slow_transpose_2d_backward,
    "Slow3d": _slow_3d_backward,
    "SlowDilated3d": _slow_dilated_backward,
    "SlowTranspose3d": _slow_transpose_3d_backward,
    "NnpackSpatial": _slow_dilated_backward,
}
