"""Matrix products on the CPU: operands that BLAS cannot take are copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fxmem.lowering.cpu_registry import Arguments, tensor, workspace
from fxmem.lowering.cpu_tape import size_bytes

_aten = torch.ops.aten

# LinearAlgebra.cpp, ``bmm_out_or_baddbmm_``: smaller products do not go to BLAS.
_SMALL_PRODUCT = 400


def _is_blas_matrix(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether one dimension is dense and the other's stride spans it."""
    rows, columns = sizes
    return (strides[1] == 1 and strides[0] >= max(1, columns)) or (
        strides[0] == 1 and strides[1] >= max(1, rows)
    )


def _matrix_copies_bytes(*operands: Tensor) -> int:
    """LinearAlgebra.cpp, ``addmm_impl_cpu_``: a clone of each operand that BLAS cannot take."""
    return sum(size_bytes(x) for x in operands if not _is_blas_matrix(x.shape, x.stride()))


@workspace(_aten.mm.default)
def _mm(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/LinearAlgebra.cpp, ``mm_out_cpu``."""
    return _matrix_copies_bytes(tensor(args[0]), tensor(args[1]))


@workspace(_aten.addmm.default)
def _addmm(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """LinearAlgebra.cpp, ``addmm_out_cpu``: the bias is copied into the result."""
    return _matrix_copies_bytes(tensor(args[1]), tensor(args[2]))


@workspace(_aten.bmm.default)
def _bmm(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """LinearAlgebra.cpp, ``bmm_out_or_baddbmm_``."""
    return _batched_bytes(tensor(args[0]), tensor(args[1]))


@workspace(_aten.baddbmm.default)
def _baddbmm(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """LinearAlgebra.cpp, ``bmm_out_or_baddbmm_``."""
    return _batched_bytes(tensor(args[1]), tensor(args[2]))


def _batched_bytes(left: Tensor, right: Tensor) -> int:
    """One matrix of each operand that BLAS cannot take, where the batch is looped over."""
    if left.shape[1] * left.shape[2] * right.shape[2] < _SMALL_PRODUCT:
        return 0
    operands = (left, right)
    return sum(
        size_bytes(x) // max(1, x.shape[0])
        for x in operands
        if not _is_blas_matrix(x.shape[1:], x.stride()[1:])
    )
