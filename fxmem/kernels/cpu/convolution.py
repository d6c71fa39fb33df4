"""Convolutions on the CPU: operands made contiguous, and the backends' workspaces.

``at::convolution`` picks a backend (``aten/src/ATen/native/Convolution.cpp``,
``_select_conv_backend``), makes its operands contiguous in the backend's memory format and calls
it, group by group where the backend knows no groups. The backends on oneDNN are in
``mkldnn_convolution``; the others, which unfold the input, in ``unfolding``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.cpu.onednn.convolution import (
    Problem,
    Sizes,
    dense_strides,
    mkldnn_backward_bytes,
    mkldnn_forward_bytes,
)
from fxmem.kernels.cpu.unfolding import is_dense, unfolded_backward_bytes, unfolded_forward_bytes
from fxmem.kernels.registry import CPU, OperatorCall
from fxmem.kernels.workspace import is_like_channels_last, size_bytes
from fxmem.versions.operators import aten

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


def _make_forward(args: tuple[Any, ...], output: Tensor) -> _Call:
    input_, weight, bias = args[:3]
    bias_dtype = bias.dtype if isinstance(bias, Tensor) else None
    return _make_call(input_, weight, tuple(output.shape), bias_dtype, args[3:9])


def convolution_backward_peak_bytes(args: tuple[Any, ...]) -> int:
    """Peak inside ``aten::convolution_backward``, the gradients included."""
    grad_output, input_, weight, bias_sizes = args[:4]
    mask = args[10]
    wanted = tuple(bool(flag) for flag in mask)
    bias_dtype = weight.dtype if bias_sizes else None
    call = _make_call(input_, weight, tuple(grad_output.shape), bias_dtype, args[4:10])
    copies, view = call.copies_bytes, _view_4d(grad_output)
    column_groups = call.problem.groups if call.backend not in _MKLDNN else 1
    if column_groups == 1 and not is_dense(view, call.problem.channels_last):
        copies += size_bytes(grad_output)
    if call.backend in _MKLDNN:
        return copies + mkldnn_backward_bytes(call.problem, wanted)
    unfolded_bytes = unfolded_backward_bytes(call.backend, call.problem, wanted, view)
    return 0 if unfolded_bytes is None else copies + unfolded_bytes


def _view_4d(tensor: Tensor) -> tuple[Sizes, Sizes]:
    """Sizes and strides with a 1d convolution's tensor seen as 2d (``view4d``)."""
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    if len(sizes) != 3:
        return sizes, strides
    inserted = sizes[2] * strides[2]
    return (*sizes[:2], 1, sizes[2]), (*strides[:2], inserted, strides[2])


def _make_call(
    input_: Tensor,
    weight: Tensor,
    output_sizes: Sizes,
    bias_dtype: torch.dtype | None,
    parameters: tuple[Any, ...],
) -> _Call:
    """Follow ``at::_convolution`` up to the call of the backend.

    A 1d input is made contiguous first, so that it never takes the channels-last path.
    """
    stride, padding, dilation, transposed, output_padding, groups = parameters
    spatial = max(input_.dim() - 2, 1)
    # ``expand_param_if_needed``: one number stands for every dimension.
    given = (stride, padding, dilation, output_padding)
    fields = [tuple(value) * (spatial if len(value) == 1 else 1) for value in given]
    input_view, weight_view = _view_4d(input_), _view_4d(weight)
    if spatial == 1:
        fields = [(neutral, *field) for neutral, field in zip((1, 0, 1, 0), fields, strict=True)]
        input_view = (input_view[0], dense_strides(input_view[0], False))
        output_sizes = (*output_sizes[:2], 1, *output_sizes[2:])
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
    # ``determine_backend_memory_format`` (ATen/native/ConvUtils.h): either operand decides.
    last = backend in (_MKLDNN | _CHANNELS_LAST_2D) and (
        is_like_channels_last(*input_view) or is_like_channels_last(*weight_view)
    )
    # slow_conv3d takes the groups itself; the others are called group by group.
    loops = 1 if backend == "Slow3d" else groups
    copies = 0
    if not is_dense(_view_4d(input_), last):
        copies += size_bytes(input_)
    if not is_dense(weight_view, last):
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


# -- Operators --

_TRANSPOSED = 6


@CPU.kernel("convolution")
def _convolve(*args: Any) -> Any:
    """A transposed 3d convolution may leave its output on a larger storage."""
    if not args[_TRANSPOSED] or args[0].dim() != 5:
        return NotImplemented
    output = aten.convolution.default(*args)
    call, nbytes = _make_forward(args, output), size_bytes(output)
    # ``slow_conv_transpose3d_cpu`` resizes ``empty_like(input)``; groups are concatenated.
    if call.backend == "SlowTranspose3d" and call.problem.groups == 1:
        nbytes = max(nbytes, size_bytes(args[0]))
    larger = output.new_empty((nbytes // output.element_size(),))
    return larger.as_strided(output.shape, output.stride())


@CPU.workspace("convolution")
def _convolution(call: OperatorCall) -> int:
    """aten/src/ATen/native/Convolution.cpp, ``_convolution``."""
    made = _make_forward(call.args, call.result)
    if made.backend in _MKLDNN:
        peak: int | None = mkldnn_forward_bytes(made.problem)
    else:
        peak = unfolded_forward_bytes(made.backend, made.problem)
    return 0 if peak is None else max(0, made.copies_bytes + peak - call.result_bytes)


@CPU.workspace("convolution_backward")
def _convolution_backward(call: OperatorCall) -> int:
    """aten/src/ATen/native/Convolution.cpp, ``convolution_backward``."""
    return max(0, convolution_backward_peak_bytes(call.args) - call.result_bytes)
