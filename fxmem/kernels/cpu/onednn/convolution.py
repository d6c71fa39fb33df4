"""Convolutions on oneDNN: the copies in blocked layouts, and the scratchpads.

Follows ``aten/src/ATen/native/mkldnn/Conv.cpp`` and the header library that it calls,
``ideep/operators/conv.hpp`` and ``deconv.hpp``: each operand is reordered where the primitive
wants another layout than the tensor has, results are made in the primitive's layout and then
copied to a dense tensor (``mkldnn_to_dense``), except under channels last, where activations are
used in place. oneDNN itself answers which layouts and scratchpads a problem takes.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import torch

from fxmem.kernels.cpu.onednn import library as onednn
from fxmem.kernels.cpu.onednn.library import longs
from fxmem.kernels.workspace import PeakTrace

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """A convolution of 2 or 3 spatial dimensions, as its kernel gets it."""

    input_sizes: Sizes  # sizes of the input
    weight_sizes: Sizes  # sizes of the weight as PyTorch has it
    weight_strides: Sizes  # strides of the weight that the kernel reads (after ``contiguous``)
    output_sizes: Sizes  # sizes of the output
    dtype: torch.dtype  # element type of the input, weight and output
    bias_dtype: torch.dtype | None  # element type of the bias, None without one
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    output_padding: Sizes
    groups: int
    transposed: bool
    channels_last: bool  # whether activations are channels last (``mkldnn_conv_use_channels_last``)
    threads: int  # number of threads, on which oneDNN's choices depend

    @property
    def kind(self) -> str:
        """oneDNN's name of the operation."""
        return "deconvolution" if self.transposed else "convolution"

    @property
    def algorithm(self) -> ctypes.c_int:
        """Direct convolution, as ``ideep`` asks for."""
        direct = onednn.DECONVOLUTION_DIRECT if self.transposed else onednn.CONVOLUTION_DIRECT
        return ctypes.c_int(direct)

    def geometry(self) -> tuple[object, ...]:
        """Strides, dilations counted from zero, and paddings to the left and the right."""
        right = tuple(p - o for p, o in zip(self.padding, self.output_padding, strict=True))
        return (
            longs(self.stride),
            longs([d - 1 for d in self.dilation]),
            longs(self.padding),
            longs(right if self.transposed else self.padding),
        )

    def grouped_weight(self) -> tuple[Sizes, Sizes]:
        """Sizes and strides of the weight in oneDNN's order of dimensions (g)oi...

        ``make_grouped_weights``: a transposed convolution's weight is io... and only its
        strides are swapped.
        """
        sizes, strides, groups = self.weight_sizes, self.weight_strides, self.groups
        first, second = (sizes[0] // groups, strides[0]), (sizes[1], strides[1])
        if self.transposed:
            first, second = second, first
        grouped = ((groups, (sizes[0] // groups) * strides[0]),) if groups > 1 else ()
        pairs = (*grouped, first, second, *zip(sizes[2:], strides[2:], strict=True))
        return tuple(size for size, _ in pairs), tuple(stride for _, stride in pairs)


@dataclass(frozen=True)
class Layouts:
    """Bytes that a primitive needs beside its user's tensors; 0 where no copy is made.

    ``is_permuted``: the primitive writes its activation plainly, but channels last, although the
    user's tensors are contiguous; ``mkldnn_to_dense`` then copies it twice.
    """

    input_bytes: int = 0
    weight_bytes: int = 0
    output_bytes: int = 0
    scratchpad_bytes: int = 0
    is_permuted: bool = False


def dense_strides(sizes: Sizes, channels_last: bool) -> Sizes:
    """Strides of a new tensor, contiguous or channels last."""
    order = [0, *range(2, len(sizes)), 1] if channels_last else list(range(len(sizes)))
    strides, step = [0] * len(sizes), 1
    for dim in reversed(order):
        strides[dim], step = step, step * sizes[dim]
    return tuple(strides)


def product_bytes(sizes: Sizes, dtype: torch.dtype) -> int:
    """Bytes of a dense tensor."""
    return math.prod(sizes) * dtype.itemsize


def mkldnn_forward_bytes(problem: Problem) -> int:
    """Peak of the kernel, its output included.

    ``_mkldnn_convolution`` and ``ideep::convolution_forward::do_compute``: scratchpad, input,
    weight and output in the primitive's layouts; the first three go before ``mkldnn_to_dense``
    allocates the output. Under channels last the output comes first and is written in place.
    """
    layouts = forward_layouts(problem)
    output_bytes = product_bytes(problem.output_sizes, problem.dtype)
    trace = PeakTrace()
    if problem.channels_last:
        trace.allocate(output_bytes)
    operands = layouts.scratchpad_bytes + layouts.input_bytes + layouts.weight_bytes
    trace.allocate(operands)
    trace.allocate(layouts.output_bytes)
    trace.free(operands)
    if not problem.channels_last:
        _to_dense(trace, output_bytes, layouts)
    return trace.peak_bytes


def mkldnn_backward_bytes(problem: Problem, mask: tuple[bool, ...]) -> int:
    """Peak of the kernel, the gradients included.

    ``mkldnn_convolution_backward``: the input's gradient first (``..._backward_input``,
    ``ideep::convolution_backward_data``), then the weight's with the bias's
    (``..._backward_weights``). C++ evaluates the arguments of ``make_tuple`` from the right (GCC,
    x86): the bias's dense gradient is made before the weight's.
    """
    trace, last = PeakTrace(), problem.channels_last
    if mask[0]:
        layouts = backward_input_layouts(problem)
        gradient_bytes = product_bytes(problem.input_sizes, problem.dtype)
        if last:
            trace.allocate(gradient_bytes)
        operands = layouts.output_bytes + layouts.weight_bytes + layouts.scratchpad_bytes
        trace.allocate(operands)
        result = trace.allocate(layouts.input_bytes)
        trace.free(operands)
        if not last:
            _to_dense(trace, gradient_bytes, layouts)
        trace.free(result)
    if mask[1] or mask[2]:
        layouts = backward_weight_layouts(problem, mask[2])
        bias_bytes = problem.output_sizes[1] * problem.dtype.itemsize if mask[2] else 0
        weight_bytes = product_bytes(problem.weight_sizes, problem.dtype)
        operands = layouts.output_bytes + layouts.input_bytes + layouts.scratchpad_bytes
        trace.allocate(operands)
        results = trace.allocate(layouts.weight_bytes + bias_bytes)
        trace.free(operands)
        trace.allocate(bias_bytes)
        dense = trace.allocate(weight_bytes)
        if last:  # ``.to(memory_format)`` copies the dense gradient once more
            trace.allocate(weight_bytes)
            trace.free(dense)
        trace.free(results)
    return trace.peak_bytes


def _to_dense(trace: PeakTrace, size_bytes: int, layouts: Layouts) -> None:
    """MKLDNNConversions.cpp, ``mkldnn_to_dense``: ends with ``cpu_tensor.contiguous()``."""
    dense = trace.allocate(size_bytes)
    if layouts.is_permuted:
        trace.allocate(size_bytes)
        trace.free(dense)


class _Descriptors:
    """Memory descriptors of a problem's operands, as ``ideep`` builds them."""

    def __init__(self, scope: onednn.Scope, problem: Problem) -> None:
        self.scope, self.problem = scope, problem
        dtype, last = problem.dtype, problem.channels_last
        input_strides = dense_strides(problem.input_sizes, last)
        output_strides = dense_strides(problem.output_sizes, last)
        weight_sizes, weight_strides = problem.grouped_weight()
        self.user_input = scope.memory(problem.input_sizes, dtype, input_strides)
        self.user_output = scope.memory(problem.output_sizes, dtype, output_strides)
        self.user_weight = scope.memory(weight_sizes, dtype, weight_strides)
        self.input = self.user_input if last else scope.memory(problem.input_sizes, dtype)
        self.output = self.user_output if last else scope.memory(problem.output_sizes, dtype)
        self.weight = scope.memory(weight_sizes, dtype)

    def bias(self, dtype: torch.dtype | None) -> ctypes.c_void_p:
        """Descriptor of the bias, null without one."""
        if dtype is None:
            return ctypes.c_void_p()
        return self.scope.memory((self.problem.output_sizes[1],), dtype)

    def forward(self, bias_dtype: torch.dtype | None) -> ctypes.c_void_p:
        """The forward primitive, which backward ones take as a hint."""
        return self.scope.primitive(
            f"{self.problem.kind}_forward",
            ctypes.c_int(onednn.FORWARD_TRAINING),
            self.problem.algorithm,
            self.input, self.weight, self.bias(bias_dtype), self.output,
            *self.problem.geometry(),
            self.scope.library.attributes,
        )  # fmt: skip

    def needed_bytes(self, primitive: ctypes.c_void_p, what: int, user: ctypes.c_void_p) -> int:
        """Bytes of an operand in the primitive's layout; 0 if the user's layout is that."""
        wanted = self.scope.library.query(primitive, what)
        if self.scope.library.equal(user, wanted):
            return 0
        return self.scope.library.size_bytes(wanted)

    def is_permuted(self, primitive: ctypes.c_void_p, what: int, sizes: Sizes) -> bool:
        """Tells whether a new activation is channels last though the operands are contiguous."""
        if self.problem.channels_last:
            return False
        dtype, library = self.problem.dtype, self.scope.library
        made = library.query(primitive, what)
        contiguous, last = (
            self.scope.memory(sizes, dtype, dense_strides(sizes, flag)) for flag in (False, True)
        )
        return library.equal(last, made) and not library.equal(contiguous, made)

    def size_bytes(self, primitive: ctypes.c_void_p, what: int) -> int:
        """Bytes of an operand in the primitive's layout."""
        return self.scope.library.size_bytes(self.scope.library.query(primitive, what))


@functools.lru_cache(maxsize=4096)
def forward_layouts(problem: Problem) -> Layouts:
    """Layouts of the forward primitive."""

    def question(scope: onednn.Scope) -> Layouts:
        descriptors = _Descriptors(scope, problem)
        primitive = descriptors.forward(problem.bias_dtype)
        return Layouts(
            descriptors.needed_bytes(primitive, onednn.QUERY_SRC, descriptors.user_input),
            descriptors.needed_bytes(primitive, onednn.QUERY_WEIGHTS, descriptors.user_weight),
            0 if problem.channels_last else descriptors.size_bytes(primitive, onednn.QUERY_DST),
            descriptors.size_bytes(primitive, onednn.QUERY_SCRATCHPAD),
            descriptors.is_permuted(primitive, onednn.QUERY_DST, problem.output_sizes),
        )

    return onednn.ask(question, Layouts())


@functools.lru_cache(maxsize=4096)
def backward_input_layouts(problem: Problem) -> Layouts:
    """Layouts of the primitive that computes the input's gradient."""

    def question(scope: onednn.Scope) -> Layouts:
        descriptors = _Descriptors(scope, problem)
        primitive = scope.primitive(
            f"{problem.kind}_backward_data",
            problem.algorithm,
            descriptors.input, descriptors.weight, descriptors.output,
            *problem.geometry(),
            descriptors.forward(None),
            scope.library.attributes,
        )  # fmt: skip
        made = problem.channels_last
        return Layouts(
            0 if made else descriptors.size_bytes(primitive, onednn.QUERY_DIFF_SRC),
            descriptors.needed_bytes(primitive, onednn.QUERY_WEIGHTS, descriptors.user_weight),
            descriptors.needed_bytes(primitive, onednn.QUERY_DIFF_DST, descriptors.user_output),
            descriptors.size_bytes(primitive, onednn.QUERY_SCRATCHPAD),
            descriptors.is_permuted(primitive, onednn.QUERY_DIFF_SRC, problem.input_sizes),
        )

    return onednn.ask(question, Layouts())


@functools.lru_cache(maxsize=4096)
def backward_weight_layouts(problem: Problem, with_bias: bool) -> Layouts:
    """Layouts of the primitive that computes the gradients of the weight and the bias."""

    def question(scope: onednn.Scope) -> Layouts:
        descriptors = _Descriptors(scope, problem)
        bias_dtype = problem.dtype if with_bias else None
        primitive = scope.primitive(
            f"{problem.kind}_backward_weights",
            problem.algorithm,
            descriptors.input, descriptors.weight, descriptors.bias(bias_dtype),
            descriptors.output,
            *problem.geometry(),
            descriptors.forward(bias_dtype),
            scope.library.attributes,
        )  # fmt: skip
        return Layouts(
            descriptors.needed_bytes(primitive, onednn.QUERY_SRC, descriptors.user_input),
            descriptors.size_bytes(primitive, onednn.QUERY_DIFF_WEIGHTS),
            descriptors.needed_bytes(primitive, onednn.QUERY_DIFF_DST, descriptors.user_output),
            descriptors.size_bytes(primitive, onednn.QUERY_SCRATCHPAD),
        )

    return onednn.ask(question, Layouts())
