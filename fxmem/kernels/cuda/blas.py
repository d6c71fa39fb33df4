"""Matrix products on CUDA: copies of operands that cuBLAS cannot read.

Source: ``aten/src/ATen/native/cuda/cuBlasCommonArgs.h`` and ``Blas.cpp``. A matrix may be
transposed, or have gaps between its rows, but not between the elements of both; an expanded batch
is read as it is, an expanded row is not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxmem.kernels.arguments import tensor
from fxmem.kernels.cuda.layouts import is_nonoverlapping_dense
from fxmem.kernels.cuda.target import CUDA
from fxmem.kernels.tape import size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten


def _has_dense_rows(x: Tensor) -> bool:
    """Whether rows, or columns, of dense elements follow each other, maybe with gaps."""
    (rows, columns), (by_row, by_column) = x.shape[-2:], x.stride()[-2:]
    by_columns = by_row == 1 and by_column >= max(1, rows)
    return by_columns or (by_column == 1 and by_row >= max(1, columns))


def _matrix_bytes(x: Tensor) -> int:
    """``prepare_matrix_for_cublas``."""
    return 0 if is_nonoverlapping_dense(x) or _has_dense_rows(x) else size_bytes(x)


def _batch_bytes(x: Tensor) -> int:
    """``prepare_batch_matrix_for_cublas``."""
    is_kept = x.is_contiguous() and 0 not in x.stride()[1:]
    return 0 if _has_dense_rows(x) or is_kept else size_bytes(x)


@CUDA.workspace(_aten.mm.default, _aten._int_mm.default)
def _mm(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Blas.cpp, ``mm_out_cuda``."""
    return _matrix_bytes(tensor(args[0])) + _matrix_bytes(tensor(args[1]))


@CUDA.workspace(_aten.addmm.default, _aten.addmm_.default, _aten._addmm_activation.default)
def _addmm(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Blas.cpp, ``addmm_out_cuda_impl``: what is added is copied into the result."""
    return _matrix_bytes(tensor(args[1])) + _matrix_bytes(tensor(args[2]))


@CUDA.workspace(_aten.bmm.default)
def _bmm(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Blas.cpp, ``bmm_out_cuda``."""
    return _batch_bytes(tensor(args[0])) + _batch_bytes(tensor(args[1]))


@CUDA.workspace(_aten.baddbmm.default, _aten.baddbmm_.default)
def _baddbmm(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Blas.cpp, ``baddbmm_out_cuda_impl``: what is added is copied into the result."""
    return _batch_bytes(tensor(args[1])) + _batch_bytes(tensor(args[2]))


@CUDA.workspace(_aten.mv.default)
def _mv(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Blas.cpp, ``addmv_out_cuda``: by ``mv``."""
    return _vector_product_bytes(tensor(args[0]), tensor(args[1]))


@CUDA.workspace(_aten.addmv.default, _aten.addmv_.default)
def _addmv(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Blas.cpp, ``addmv_out_cuda``."""
    return _vector_product_bytes(tensor(args[1]), tensor(args[2]))


def _vector_product_bytes(matrix: Tensor, vector: Tensor) -> int:
    """A matrix without dense rows or columns, and a vector of one element seen everywhere."""
    copied = 0 if _has_dense_rows(matrix) or matrix.is_contiguous() else size_bytes(matrix)
    spread = vector.stride(0) == 0 and not vector.is_contiguous()
    return copied + (size_bytes(vector) if spread else 0)
