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
from torch._prims_common import suggest_memory_format

from fxmem.kernels.cpu.onednn.convolution import (
    Problem,
    Sizes,
    mkldnn_backward_bytes,
    mkldnn_forward_bytes,
)
from fxmem.kernels.cpu.unfolding import unfolded_backward_bytes, unfolded_forward_bytes
from fxmem.kernels.registry import CPU, OperatorCall
from fxmem.kernels.workspace import dense_bytes, size_bytes
from fxmem.versions.operators import aten

_MKLDNN = frozenset({"Mkldnn", "MkldnnTranspose"})
_CHANNELS_LAST_2D = frozenset({"Slow2d", "SlowDilated2d", "SlowTranspose2d"})


@dataclass(frozen=True)
class _Convolution:
    """One convolution as its backend gets it."""

    backend: str  # as in PyTorch's ``ConvBackend``
    problem: Problem
    input: Tensor  # dense, of two or three spatial dimensions
    memory_format: torch.memory_format
    copies_bytes: int  # contiguous copies that live as long as the call


def _view_4d(x: Tensor) -> Tensor:
    """``view4d``: one spatial dimension becomes two."""
    return x.unsqueeze(2) if x.dim() == 3 else x


def _prepare(
    input_: Tensor,
    weight: Tensor,
    output: Tensor,
    bias_dtype: torch.dtype | None,
    parameters: tuple[Any, ...],
) -> _Convolution:
    """Follows ``at::_convolution`` up to the call of the backend.

    A 1d input is made contiguous first, so that it never takes the channels-last path.
    """
    stride, padding, dilation, transposed, output_padding, groups = parameters
    spatial = max(input_.dim() - 2, 1)
    # ``expand_param_if_needed``: one number stands for every dimension.
    given = (stride, padding, dilation, output_padding)
    fields = [tuple(value) * (spatial if len(value) == 1 else 1) for value in given]
    copies, x, weight = 0, input_, _view_4d(weight)
    if spatial == 1:
        fields = [(neutral, *field) for neutral, field in zip((1, 0, 1, 0), fields, strict=True)]
        copies += dense_bytes(x)
        x = _view_4d(torch.empty_like(x, memory_format=torch.contiguous_format))
    threads = torch.get_num_threads()
    backend = _select_backend(
        tuple(x.shape),
        tuple(weight.shape),
        x.dtype,
        bias_dtype,
        tuple(fields),
        bool(transposed),
        groups,
        (threads, torch.backends.mkldnn.enabled, torch._C._get_nnpack_enabled()),
    )
    # ``determine_backend_memory_format`` (ATen/native/ConvUtils.h): either operand decides.
    memory_format = torch.contiguous_format
    if backend in (_MKLDNN | _CHANNELS_LAST_2D):
        suggested = {suggest_memory_format(y) for y in (x, weight)} - {memory_format}
        memory_format = suggested.pop() if suggested else memory_format
    copies += sum(dense_bytes(y, memory_format) for y in (x, weight))
    x, weight = (
        y if not dense_bytes(y, memory_format) else torch.empty_like(y, memory_format=memory_format)
        for y in (x, weight)
    )
    problem = Problem(
        input_sizes=tuple(x.shape),
        weight_sizes=tuple(weight.shape),
        weight_strides=weight.stride(),
        output_sizes=tuple(_view_4d(output).shape),
        dtype=x.dtype,
        bias_dtype=bias_dtype,
        stride=fields[0],
        padding=fields[1],
        dilation=fields[2],
        output_padding=fields[3],
        # slow_conv3d takes the groups itself; the others are called group by group.
        groups=1 if backend == "Slow3d" else groups,
        transposed=bool(transposed),
        channels_last=memory_format != torch.contiguous_format,
        threads=threads,
    )
    return _Convolution(backend, problem, x, memory_format, copies)


def _prepare_forward(args: tuple[Any, ...], output: Tensor) -> _Convolution:
    bias_dtype = args[2].dtype if isinstance(args[2], Tensor) else None
    return _prepare(args[0], args[1], output, bias_dtype, args[3:9])


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
    made, nbytes = _prepare_forward(args, output), size_bytes(output)
    # ``slow_conv_transpose3d_cpu`` resizes ``empty_like(input)``; groups are concatenated.
    if made.backend == "SlowTranspose3d" and made.problem.groups == 1:
        nbytes = max(nbytes, size_bytes(args[0]))
    larger = output.new_empty((nbytes // output.element_size(),))
    return larger.as_strided(output.shape, output.stride())


@CPU.workspace("convolution")
def _convolution(call: OperatorCall) -> int:
    """aten/src/ATen/native/Convolution.cpp, ``_convolution``."""
    made = _prepare_forward(call.args, call.result)
    if made.backend in _MKLDNN:
        peak: int | None = mkldnn_forward_bytes(made.problem)
    else:
        peak = unfolded_forward_bytes(made.backend, made.problem, made.input)
    return 0 if peak is None else max(0, made.copies_bytes + peak - call.result_bytes)


@CPU.workspace("convolution_backward")
def _convolution_backward(call: OperatorCall) -> int:
    """aten/src/ATen/native/Convolution.cpp, ``convolution_backward``."""
    grad, input_, weight, bias_sizes = call.args[:4]
    wanted = tuple(map(bool, call.args[10]))
    bias_dtype = weight.dtype if bias_sizes else None
    made = _prepare(input_, weight, grad, bias_dtype, call.args[4:10])
    copies, grad = made.copies_bytes, _view_4d(grad)
    if made.backend in _MKLDNN or made.problem.groups == 1:
        copies += dense_bytes(grad, made.memory_format)
    if made.backend in _MKLDNN:
        peak: int | None = mkldnn_backward_bytes(made.problem, wanted)
    else:
        peak = unfolded_backward_bytes(made.backend, made.problem, wanted, grad, made.input)
    return 0 if peak is None else max(0, copies + peak - call.result_bytes)
