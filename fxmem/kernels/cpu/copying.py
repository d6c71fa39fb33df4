"""Copies that rearrange elements on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxmem.kernels.arguments import argument, tensor
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.tape import Tape, is_like_channels_last, size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
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
    """Peak of the contiguous copies of what is not contiguous, made one after the other."""
    tape = Tape()
    for x in operands:
        if not x.is_contiguous():
            tape.allocate(size_bytes(x))
            tape.free(tape.allocate(transposing_buffer_bytes(x)))
    return tape.peak_bytes


def copies_bytes(model: Tensor, *operands: Tensor) -> int:
    """Bytes of the operands' copies in the format that the model's strides suggest."""
    wanted = torch.contiguous_format
    if is_like_channels_last(model.shape, model.stride()):
        wanted = torch.channels_last if model.dim() == 4 else torch.channels_last_3d
    return sum(size_bytes(x) for x in operands if not x.is_contiguous(memory_format=wanted))


@CPU.workspace(_aten.clone.default)
def _clone(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/TensorFactories.cpp, ``clone``."""
    return transposing_buffer_bytes(tensor(args[0])) if tensor(outputs).is_contiguous() else 0


@CPU.workspace(_aten.copy_.default)
def _copy(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Copy.cpp, ``copy_impl``."""
    target, source = tensor(args[0]), tensor(args[1])
    alike = target.dtype == source.dtype and target.shape == source.shape
    return transposing_buffer_bytes(source) if alike and target.is_contiguous() else 0


@CPU.workspace(_aten.roll.default)
def _roll(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/TensorTransformations.cpp, ``roll_common``.

    Rolls one dimension and calls itself for the rest, holding each intermediate; without
    dimensions it rolls all elements in their order.
    """
    x, dims = tensor(args[0]), argument(args, kwargs, 2, "dims")
    count = len(dims) if isinstance(dims, (list, tuple)) else 0
    if not count:
        return 0 if x.is_contiguous() else size_bytes(x)
    return (count - 1) * size_bytes(x)


@CPU.workspace(_aten.triu.default, _aten.tril.default)
def _triangle(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/TriangularOps.cpp, ``triu_tril_cpu_template``."""
    x = tensor(args[0])
    return 0 if _follow_each_other(x) else size_bytes(x)


@CPU.workspace(_aten.triu_.default, _aten.tril_.default)
def _triangle_in_place(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """TriangularOps.cpp, likewise: both operands are copies, from four dimensions on."""
    x = tensor(args[0])
    return 0 if x.dim() <= 3 or _follow_each_other(x) else 2 * size_bytes(x)


def _follow_each_other(x: Tensor) -> bool:
    """``checkTrilTriuBatchContiguous``: the matrices of a batch lie without gaps."""
    if x.is_contiguous():
        return True
    expected = x.shape[-1] * x.shape[-2]
    for dim in range(x.dim() - 3, -1, -1):
        if x.stride(dim) != expected:
            return False
        expected *= x.shape[dim]
    return True


@CPU.workspace(
    _aten.pixel_shuffle.default, _aten.pixel_unshuffle.default, _aten.channel_shuffle.default
)
def _shuffle(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/PixelShuffle.cpp and ChanelShuffle.cpp: a contiguous input."""
    x = tensor(args[0])
    return copies_bytes(x, x)


@CPU.workspace(_aten.unfold_backward.default)
def _unfold_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/UnfoldBackward.h, ``_make_unfold_backward_iter_over_grad_out``.

    An index for each position along the dimension, where windows overlap.
    """
    out, (dim, size, step) = tensor(outputs), (int(str(value)) for value in args[2:5])
    return out.shape[dim] * _INDEX_BYTES if out.dim() and step < size else 0


@CPU.workspace(
    *(
        getattr(_aten, f"{kind}_pad{dims}d{suffix}").default
        for kind in ("reflection", "replication")
        for dims in (1, 2, 3)
        for suffix in ("", "_backward")
    )
)
def _pad(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/cpu/PaddingKernel.cpp, ``cpu_padding``: in one dense format."""
    return copies_bytes(tensor(outputs), tensor(args[0]))


@CPU.workspace(_aten.affine_grid_generator.default)
def _affine_grid(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/AffineGridGenerator.cpp: homogeneous coordinates of the pixels."""
    out = tensor(outputs)
    return out.numel() // out.shape[-1] * (out.shape[-1] + 1) * out.element_size()
