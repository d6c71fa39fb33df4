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
from torch._prims_common import make_channels_last_strides_for, make_contiguous_strides_for

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
    make = make_channels_last_strides_for if channels_last else make_contiguous_strides_for
    return tuple(make(sizes))


def product_bytes(sizes: Sizes, dtype: torch.dtype) -> int:
    """Bytes of a dense tensor."""
    return math.prod(sizes) * dtype.itemsize


def mkldnn_forward_bytes(problem: Problem) -> int:
    """Peak of the kernel, its output included.

    ``_mkldnn_convolution`` and ``ideep::convolution_forward::do_compute``: scratchpad, input,
    weight and output in the primitive's layouts; the first three go before ``mkldnn_to_dense``
    allocates the output. Under channels last the output comes first and is written in place.
    """
    layouts = find_layouts(problem, "forward", problem.bias_dtype)
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
        layouts = find_layouts(problem, "backward_data")
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
        layouts = find_layouts(problem, "backward_weights", problem.dtype if mask[2] else None)
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
        self.sizes = (problem.input_sizes, problem.weight_sizes, problem.output_sizes)
        weight_sizes, weight_strides = problem.grouped_weight()
        self.user = tuple(
            scope.memory(sizes, dtype, strides)
            for sizes, strides in (
                (problem.input_sizes, dense_strides(problem.input_sizes, last)),
                (weight_sizes, weight_strides),
                (problem.output_sizes, dense_strides(problem.output_sizes, last)),
            )
        )
        self.input = self.user[0] if last else scope.memory(problem.input_sizes, dtype)
        self.weight = scope.memory(weight_sizes, dtype)
        self.output = self.user[2] if last else scope.memory(problem.output_sizes, dtype)

    def make(self, kind: str, bias_dtype: torch.dtype | None) -> ctypes.c_void_p:
        """Makes a primitive; backward ones take the forward one as a hint."""
        is_forward = kind == "forward"
        biases = []
        if kind != "backward_data":
            sizes = (self.problem.output_sizes[1],)
            no_bias = ctypes.c_void_p()
            biases.append(self.scope.memory(sizes, bias_dtype) if bias_dtype else no_bias)
        return self.scope.primitive(
            f"{self.problem.kind}_{kind}",
            *([ctypes.c_int(onednn.FORWARD_TRAINING)] if is_forward else []),
            self.problem.algorithm,
            self.input, self.weight, *biases, self.output,
            *self.problem.geometry(),
            *([] if is_forward else [self.make("forward", bias_dtype)]),
            self.scope.library.attributes,
        )  # fmt: skip

    def measure(self, primitive: ctypes.c_void_p, at: int, query: int, is_made: bool) -> int:
        """Measures an operand in the primitive's layout; 0 if that is the user's."""
        library = self.scope.library
        wanted = library.query(primitive, query)
        if is_made:
            is_used = self.problem.channels_last and at != _WEIGHT
        else:
            is_used = library.equal(self.user[at], wanted)
        return 0 if is_used else library.size_bytes(wanted)

    def is_permuted(self, primitive: ctypes.c_void_p, at: int, query: int) -> bool:
        """Returns whether a new activation is channels last though the operands are contiguous."""
        if self.problem.channels_last:
            return False
        dtype, library = self.problem.dtype, self.scope.library
        made = library.query(primitive, query)
        contiguous, last = (
            self.scope.memory(self.sizes[at], dtype, dense_strides(self.sizes[at], flag))
            for flag in (False, True)
        )
        return library.equal(last, made) and not library.equal(contiguous, made)


_WEIGHT = 1
_OPERANDS = {
    "forward": ((onednn.QUERY_SRC, False), (onednn.QUERY_WEIGHTS, False), (onednn.QUERY_DST, True)),
    "backward_data": (
        (onednn.QUERY_DIFF_SRC, True),
        (onednn.QUERY_WEIGHTS, False),
        (onednn.QUERY_DIFF_DST, False),
    ),
    "backward_weights": (
        (onednn.QUERY_SRC, False),
        (onednn.QUERY_DIFF_WEIGHTS, True),
        (onednn.QUERY_DIFF_DST, False),
    ),
}
"""By primitive: how to ask for input, weight and output, and whether it makes them."""


@functools.lru_cache(maxsize=4096)
def find_layouts(problem: Problem, kind: str, bias_dtype: torch.dtype | None = None) -> Layouts:
    """Finds the layouts of a primitive, which is one of ``_OPERANDS``."""

    def question(scope: onednn.Scope) -> Layouts:
        descriptors = _Descriptors(scope, problem)
        primitive = descriptors.make(kind, bias_dtype)
        operands = list(enumerate(_OPERANDS[kind]))
        x, weight, out = (descriptors.measure(primitive, at, *operand) for at, operand in operands)
        scratchpad = scope.library.query(primitive, onednn.QUERY_SCRATCHPAD)
        is_permuted = any(
            descriptors.is_permuted(primitive, at, query)
            for at, (query, is_made) in operands
            if is_made and at != _WEIGHT
        )
        return Layouts(x, weight, out, scope.library.size_bytes(scratchpad), is_permuted)

    return onednn.ask(question, Layouts())
