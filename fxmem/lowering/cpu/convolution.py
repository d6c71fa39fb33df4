"""What CPU convolution kernels allocate inside themselves.

``at::convolution`` picks a backend (``aten/src/ATen/native/Convolution.cpp``,
``_select_conv_backend``), makes its operands contiguous in the backend's memory format and calls
it, group by group where the backend knows no groups. The backends on oneDNN are in
``mkldnn_convolution``; the others unfold the input into columns (im2col) and multiply matrices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fxmem.lowering.cpu.mkldnn_convolution import (
    Problem,
    Sizes,
    dense_strides,
    mkldnn_backward_bytes,
    mkldnn_forward_bytes,
    product_bytes,
)
from fxmem.lowering.cpu.reduction import sum_dense_bytes
from fxmem.lowering.tape import Tape, is_like_channels_last, size_bytes

_MKLDNN = frozenset({"Mkldnn", "MkldnnTranspose"})
_CHANNELS_LAST_2D = frozenset({"Slow2d", "SlowDilated2d", "SlowTranspose2d"})


@dataclass(frozen=True)
class _Call:
    """One convolution as its backend gets it.

    A 1d convolution becomes a 2d one (``view1d_as_2d``); ``copies_bytes`` are the contiguous
    copies that live as long as the call.
    """

    backend: str
    problem: Problem
    copies_bytes: int


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


def convolution_peak_bytes(args: tuple[object, ...], output: Tensor) -> int:
    """Peak inside ``aten::convolution``, its output included."""
    input_, weight, bias = args[:3]
    assert isinstance(input_, Tensor) and isinstance(weight, Tensor)
    bias_dtype = bias.dtype if isinstance(bias, Tensor) else None
    call = _make_call(input_, weight, tuple(output.shape), bias_dtype, args[3:9])
    if call.backend in _MKLDNN:
        return call.copies_bytes + mkldnn_forward_bytes(call.problem)
    forward = _FORWARD.get(call.backend)
    if forward is None:
        return size_bytes(output)
    return call.copies_bytes + _grouped_forward_bytes(call.problem, forward)


def convolution_backward_peak_bytes(args: tuple[object, ...]) -> int:
    """Peak inside ``aten::convolution_backward``, the gradients included."""
    grad_output, input_, weight, bias_sizes = args[:4]
    mask = args[10]
    assert isinstance(grad_output, Tensor) and isinstance(input_, Tensor)
    assert isinstance(weight, Tensor) and isinstance(mask, (list, tuple))
    wanted = tuple(bool(flag) for flag in mask)
    bias_dtype = weight.dtype if bias_sizes else None
    call = _make_call(input_, weight, tuple(grad_output.shape), bias_dtype, args[4:10])
    copies, view = call.copies_bytes, _view_4d(grad_output)
    column_groups = call.problem.groups if call.backend not in _MKLDNN else 1
    if column_groups == 1 and not _is_dense(view, call.problem.channels_last):
        copies += size_bytes(grad_output)
    if call.backend in _MKLDNN:
        return copies + mkldnn_backward_bytes(call.problem, wanted)
    backward = _BACKWARD.get(call.backend)
    if backward is None:
        return 0
    return copies + _grouped_backward_bytes(call.problem, wanted, view, backward)


def _view_4d(tensor: Tensor) -> tuple[Sizes, Sizes]:
    """Sizes and strides with a 1d convolution's tensor seen as 2d (``view4d``)."""
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    if len(sizes) != 3:
        return sizes, strides
    inserted = sizes[2] * strides[2]
    return (*sizes[:2], 1, sizes[2]), (*strides[:2], inserted, strides[2])


def _is_dense(view: tuple[Sizes, Sizes], channels_last: bool) -> bool:
    """``Tensor.is_contiguous(memory_format)``: strides of dimensions of size 1 are free."""
    sizes, strides = view
    wanted = dense_strides(sizes, channels_last)
    return 0 in sizes or all(
        size == 1 or have == want for size, have, want in zip(sizes, strides, wanted, strict=True)
    )


def _make_call(
    input_: Tensor,
    weight: Tensor,
    output_sizes: Sizes,
    bias_dtype: torch.dtype | None,
    parameters: tuple[object, ...],
) -> _Call:
    """Follow ``at::_convolution`` up to the call of the backend.

    A 1d input is made contiguous first, so that it never takes the channels-last path.
    """
    stride, padding, dilation, transposed, output_padding, groups = parameters
    spatial = max(input_.dim() - 2, 1)
    fields = [_expand(value, spatial) for value in (stride, padding, dilation, output_padding)]
    input_view, weight_view = _view_4d(input_), _view_4d(weight)
    if spatial == 1:
        fields = [(neutral, *field) for neutral, field in zip((1, 0, 1, 0), fields, strict=True)]
        input_view = (input_view[0], dense_strides(input_view[0], False))
        output_sizes = (*output_sizes[:2], 1, *output_sizes[2:])
    assert isinstance(groups, int)
    threads = torch.get_num_threads()
    backend = _select_backend(
        input_view[0],
        weight_view[0],
        input_.dtype,
        bias_dtype,
        tuple(fields),
        bool(transposed),
        groups,
        (threads, torch.backends.mkldnn.enabled, torch._C._get_nnpack_enabled()),
    )
    last = _uses_channels_last(backend, input_view, weight_view)
    # slow_conv3d takes the groups itself; the others are called group by group.
    loops = 1 if backend == "Slow3d" else groups
    copies = 0
    if not _is_dense(_view_4d(input_), last):
        copies += size_bytes(input_)
    if not _is_dense(weight_view, last):
        copies += size_bytes(weight)
        weight_view = (weight_view[0], dense_strides(weight_view[0], last))
    problem = Problem(
        input_sizes=input_view[0],
        weight_sizes=weight_view[0],
        weight_strides=weight_view[1],
        output_sizes=output_sizes,
        dtype=input_.dtype,
        bias_dtype=bias_dtype,
        stride=fields[0],
        padding=fields[1],
        dilation=fields[2],
        output_padding=fields[3],
        groups=loops,
        transposed=bool(transposed),
        channels_last=last,
        threads=threads,
    )
    return _Call(backend, problem, copies)


def _expand(value: object, count: int) -> Sizes:
    """``expand_param_if_needed``: one number stands for every dimension."""
    assert isinstance(value, (list, tuple))
    numbers = tuple(int(number) for number in value)
    return numbers * count if len(numbers) == 1 else numbers


@functools.lru_cache(maxsize=4096)
def _select_backend(
    input_sizes: Sizes,
    weight_sizes: Sizes,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    fields: tuple[Sizes, ...],
    transposed: bool,
    groups: int,
    settings: tuple[object, ...],
) -> str:
    """Name of ``ConvBackend`` that PyTorch itself selects, given empty tensors of these sizes.

    ``ConvParams::use_mkldnn`` asks for mkldnn being enabled, the type, the batch, the kernel
    and the number of threads; ``settings`` keeps answers apart that rest on other global ones.
    """
    stride, padding, dilation, output_padding = fields
    with torch._C._DisableTorchDispatch():  # real tensors of one element, also under fake modes
        input_ = torch.empty(1, dtype=dtype).expand(input_sizes)
        weight = torch.empty(1, dtype=dtype).expand(weight_sizes)
        outputs = weight_sizes[1] * groups if transposed else weight_sizes[0]
        bias = None if bias_dtype is None else torch.empty(1, dtype=bias_dtype).expand(outputs)
        selected = torch._C._select_conv_backend(
            input_, weight, bias, stride, padding, dilation, transposed, output_padding, groups
        )
    # The binding names all backends but the transposed one of oneDNN.
    name = str(selected).rsplit(".", 1)[-1]
    return "MkldnnTranspose" if name == "???" else name


def _uses_channels_last(
    backend: str, input_view: tuple[Sizes, Sizes], weight_view: tuple[Sizes, Sizes]
) -> bool:
    """``determine_backend_memory_format`` (ATen/native/ConvUtils.h): either operand decides."""
    if backend not in _MKLDNN and backend not in _CHANNELS_LAST_2D:
        return False
    return is_like_channels_last(*input_view) or is_like_channels_last(*weight_view)


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
    if problem.groups == 1 or _is_dense((part, strides), False):
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
    """NaiveConvolutionTranspose3d.cpp: the output starts as ``empty_like(input)``."""
    started = tape.allocate(frame.input_bytes)
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
