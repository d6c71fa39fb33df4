"""Copies that rearrange elements on the CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxmem.kernels.registry import CPU, Estimator, OperatorCall, Workspace
from fxmem.kernels.workspace import (
    RESULT,
    BlockTrace,
    PeakTrace,
    copy_operands,
    dense_bytes,
    size_bytes,
)

_INDEX_BYTES = 8

# Copy.cpp, ``copy_transpose_valid`` and ``copy_same_type_transpose_``.
_LEAST_TRANSPOSED = 60 * 60
_BLOCK = 60
_BYTE_BLOCK = 120


def transposing_buffer_bytes(source: Tensor) -> int:
    """aten/src/ATen/native/Copy.cpp, ``copy_same_type_transpose_``.

    A matrix whose columns are dense is copied block by block into one whose rows are.
    """
    if source.dim() != 2 or source.numel() < _LEAST_TRANSPOSED:
        return 0
    if source.stride(0) != 1 or source.stride(1) != source.shape[0]:
        return 0
    block = _BYTE_BLOCK if source.dtype == torch.uint8 else _BLOCK
    return block * block * source.element_size()


def contiguous_copies_bytes(*operands: Tensor) -> int:
    """Peak of contiguous copies, made one after the other where operands are not contiguous."""
    trace = PeakTrace()
    for x in operands:
        if not x.is_contiguous():
            trace.allocate(size_bytes(x))
            trace.free(trace.allocate(transposing_buffer_bytes(x)))
    return trace.peak_bytes


def copy_contiguous(*operands: int) -> Estimator:
    """Makes the rule of a kernel that copies operands at these positions one after the other."""

    def estimate(call: OperatorCall) -> int:
        found = (call.args[at] for at in operands)
        return contiguous_copies_bytes(*(x for x in found if isinstance(x, Tensor)))

    return estimate


@CPU.workspace("clone")
def _clone(call: OperatorCall) -> int:
    """aten/src/ATen/native/TensorFactories.cpp, ``clone``."""
    return transposing_buffer_bytes(call.tensor(0)) if call.result.is_contiguous() else 0


@CPU.workspace("copy_")
def _copy(call: OperatorCall) -> int:
    """aten/src/ATen/native/Copy.cpp, ``copy_impl``."""
    target, source = call.tensor(0), call.tensor(1)
    alike = target.dtype == source.dtype and target.shape == source.shape
    return transposing_buffer_bytes(source) if alike and target.is_contiguous() else 0


@CPU.workspace("roll")
def _roll(call: OperatorCall) -> int:
    """aten/src/ATen/native/TensorTransformations.cpp, ``roll_common``.

    Rolls one dimension and calls itself for the rest, holding each intermediate; without
    dimensions it rolls all elements in their order.
    """
    x, dims = call.tensor(0), call.get(2, "dims")
    count = len(dims) if isinstance(dims, (list, tuple)) else 0
    if not count:
        return dense_bytes(x)
    return (count - 1) * size_bytes(x)


@CPU.workspace("triu", "tril")
def _triangle(call: OperatorCall) -> int:
    """aten/src/ATen/native/TriangularOps.cpp, ``triu_tril_cpu_template``."""
    x = call.tensor(0)
    # ``checkTrilTriuBatchContiguous``: the matrices of a batch lie without gaps.
    follow = (math.prod(x.shape[dim + 1 :]) for dim in range(x.dim() - 2))
    return 0 if x.is_contiguous() or x.stride()[:-2] == tuple(follow) else size_bytes(x)


# aten/src/ATen/native/PixelShuffle.cpp and ChanelShuffle.cpp.
CPU.workspace("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")(copy_operands(0, like=0))
# aten/src/ATen/native/cpu/PaddingKernel.cpp, ``cpu_padding``: in the format of the result.
CPU.workspace(
    *(
        f"{kind}_pad{dims}d{suffix}"
        for kind in ("reflection", "replication")
        for dims in (1, 2, 3)
        for suffix in ("", "_backward")
    )
)(copy_operands(0, like=RESULT))


@CPU.workspace("_chunk_cat.out")
def _chunk_cat(call: OperatorCall) -> Workspace:
    """aten/src/ATen/native/TensorShape.cpp, ``_pad_chunk`` and ``cat_out_cpu``.

    Tensors that chunks do not divide evenly are padded with zeros, all of them, and tensors of
    another dtype than the result copied one by one.
    """
    tensors, dim, chunks = call.args[:3]
    trace, copied = BlockTrace(), []
    for x in tensors:
        length = x.shape[dim]
        padded_bytes = size_bytes(x) // length * (length + -length % chunks)
        copied.append(padded_bytes if x.dtype != call.kwargs["out"].dtype else 0)
        if length % chunks:
            trace.allocate(padded_bytes)
            trace.free(trace.allocate(transposing_buffer_bytes(x)))
    for nbytes in copied:
        trace.free(trace.allocate(nbytes))
    return trace.finish()
