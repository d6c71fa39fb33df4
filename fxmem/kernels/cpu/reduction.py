"""Reductions on the CPU: partial results per thread, and means as sum and division."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fxmem.kernels.registry import CPU, OperatorCall
from fxmem.kernels.workspace import PeakTrace, size_bytes

# at::internal::GRAIN_SIZE (aten/src/ATen/TensorIterator.h): less is not shared among threads.
GRAIN_SIZE = 32768
# A Python number becomes a tensor of 8 bytes (c10/core/Scalar.h, ``wrapped_scalar_tensor``).
_SCALAR_BYTES = 8
_REDUCED = (torch.float16, torch.bfloat16)


def two_pass_bytes(elements: int, results: int, itemsize: int) -> int:
    """aten/src/ATen/native/TensorIteratorReduce.cpp, ``two_pass_reduction``.

    A full reduction keeps one partial result per thread.
    """
    threads = torch.get_num_threads()
    if results != 1 or elements < GRAIN_SIZE or threads == 1:
        return 0
    return threads * itemsize


def _cast_bytes(x: Tensor, out: Tensor) -> int:
    """aten/src/ATen/native/ReduceOpsUtils.h, ``make_reduction_from_ty``.

    The input is cast as a whole to the type of the result.
    """
    return 0 if x.dtype == out.dtype else x.numel() * out.element_size()


@CPU.workspace(
    "nansum", "prod", "prod.dim_int",
    "any", "any.dim", "any.dims",
    "all", "all.dim", "all.dims",
)  # fmt: skip
def _reduce(call: OperatorCall) -> int:
    """aten/src/ATen/native/ReduceOps.cpp, ``prod_out_cpu`` and the like."""
    x, out = call.tensor(0), call.result
    return _cast_bytes(x, out) + two_pass_bytes(x.numel(), out.numel(), out.element_size())


@CPU.workspace("sum", "sum.dim_IntList")
def _sum(call: OperatorCall) -> int:
    """ReduceOps.cpp, ``sum_out``."""
    x, out = call.tensor(0), call.result
    dims = call.get(1, "dim")
    reduced = [int(dim) for dim in dims] if isinstance(dims, (list, tuple)) else []
    return sum_bytes(x, reduced, out.numel(), out.dtype)


def sum_bytes(x: Tensor, dims: Sequence[int], results: int, dtype: torch.dtype) -> int:
    """Bytes that a sum takes besides its results.

    Reduced types are summed in a float copy, into float sums, where the loop over two dimensions
    would round in between (``should_use_acc_buffer``).
    """
    cast_bytes = 0 if x.dtype == dtype else x.numel() * dtype.itemsize
    strides = torch.empty_like(x).stride() if cast_bytes else x.stride()
    is_float = x.dtype == torch.float32
    return cast_bytes + sum_dense_bytes(x.shape, strides, dims, results, dtype, is_float=is_float)


def sum_dense_bytes(
    sizes: Sequence[int],
    strides: Sequence[int],
    dims: Sequence[int],
    results: int,
    dtype: torch.dtype,
    *,
    is_float: bool = False,
) -> int:
    """The same of a sum in the type of its operand, or of a float operand (``is_float``)."""
    elements, partial_bytes, total = math.prod(sizes), dtype.itemsize, 0
    if dtype in _REDUCED and _count_loops(sizes, strides, dims) > 1:
        partial_bytes = torch.float32.itemsize
        total = (results + (not is_float) * elements) * partial_bytes
    return total + two_pass_bytes(elements, results, partial_bytes)


def _count_loops(sizes: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> int:
    """Counts loops over merged dimensions (TensorIterator.cpp, ``coalesce_dimensions``).

    They come first, by their strides; no dimensions are all of them.
    """
    reduced = {dim % len(sizes) for dim in dims} if dims else set(range(len(sizes)))
    kept = sorted((strides[dim], sizes[dim]) for dim in reduced if sizes[dim] != 1)
    breaks = sum(stride * size != following for (stride, size), (following, _) in pairwise(kept))
    return breaks + bool(kept)


@CPU.workspace("linalg_vector_norm")
def _norm(call: OperatorCall) -> int:
    """aten/src/ATen/native/LinearAlgebra.cpp, ``linalg_vector_norm_out``."""
    return _cast_bytes(call.tensor(0), call.result) if call.kwargs.get("dtype") else 0


@CPU.workspace("mean", "mean.dim")
def _mean(call: OperatorCall) -> int:
    """ReduceOps.cpp, ``mean_kernel_impl`` by ``sum_out(...).div_(count)``.

    Reduced types are summed in a float copy, whose float mean is cast back.
    """
    x, out = call.tensor(0), call.result
    trace = PeakTrace()
    if x.dtype in _REDUCED:
        trace.allocate(out.numel() * 4)
        trace.free(trace.allocate(x.numel() * 4))
    else:
        trace.free(trace.allocate(_cast_bytes(x, out)))
    trace.free(trace.allocate(two_pass_bytes(x.numel(), out.numel(), out.element_size())))
    trace.allocate(_SCALAR_BYTES + max(4, out.element_size()))
    return trace.peak_bytes


@CPU.workspace("logsumexp")
def _logsumexp(call: OperatorCall) -> int:
    """ReduceOps.cpp, ``logsumexp_out_impl``: the shifted exponentials and their sum."""
    x, out = call.tensor(0), call.result
    partial = two_pass_bytes(x.numel(), out.numel(), out.element_size())
    return size_bytes(x) + size_bytes(out) + partial
