"""Matrix products on the CPU: operands that BLAS cannot take are copied.

Reduced types go to oneDNN where the processor has instructions for them, with a scratchpad that
oneDNN itself states.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxmem.kernels.cpu.onednn import library as onednn
from fxmem.kernels.registry import CPU, OperatorCall
from fxmem.kernels.workspace import PeakTrace, measure_product, size_bytes

LINEAR_ALGEBRA = (
    "_linalg_svd", "_linalg_eigh", "_linalg_eigvals", "linalg_eig", "linalg_eigvals", "linalg_qr",
    "linalg_cholesky_ex", "linalg_lu", "linalg_lu_factor_ex", "linalg_ldl_factor_ex",
    "linalg_inv_ex", "_linalg_det", "_linalg_slogdet", "_linalg_solve_ex",
    "linalg_solve_triangular", "linalg_lstsq", "linalg_householder_product", "cholesky_solve",
    "cholesky_inverse", "triangular_solve", "lu_unpack", "ormqr", "geqrf",
)  # fmt: skip
"""Decompositions and solvers, whose libraries take workspaces that PyTorch does not state."""

CPU.leave_out("LAPACK takes a workspace and copies in column order", *LINEAR_ALGEBRA)
CPU.leave_out("MKL takes copies of strided inputs", "_fft_r2c", "_fft_c2r", "_fft_c2c")
CPU.leave_out(
    "scratch of a kernel that few models run",
    "_sample_dirichlet", "dist", "renorm", "soft_margin_loss", "soft_margin_loss_backward",
    "index_reduce", "index_reduce_", "mvlgamma",
    "_segment_reduce_backward", "tril_", "triu_", "unfold_backward", "affine_grid_generator",
    "_unique2", "unique_dim", "unique_dim_consecutive", "kthvalue", "median", "median.dim",
    "nanmedian", "nanmedian.dim", "multinomial", "_trilinear",
)  # fmt: skip

# LinearAlgebra.cpp, ``bmm_out_or_baddbmm_``: smaller products do not go to BLAS.
_SMALL_PRODUCT = 400
# mkldnn/Matmul.cpp, ``mkldnn_gemm_min_size``: smaller products do not go to oneDNN.
_SMALL_MKLDNN_PRODUCT = 16 * 16 * 16


def _is_blas_matrix(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether one dimension is dense and the other's stride spans it."""
    rows, columns = sizes
    return (strides[1] == 1 and strides[0] >= max(1, columns)) or (
        strides[0] == 1 and strides[1] >= max(1, rows)
    )


def _matrix_copies_bytes(*operands: Tensor) -> int:
    """LinearAlgebra.cpp, ``addmm_impl_cpu_``: a clone of each operand that BLAS cannot take.

    BLAS takes an operand to be conjugated only transposed.
    """
    total = 0
    for x in operands:
        has_rows = x.stride(1) == 1 and x.stride(0) >= max(1, x.shape[1])
        if (x.is_conj() and has_rows) or not _is_blas_matrix(x.shape, x.stride()):
            total += size_bytes(x)
    return total


@functools.cache
def has_instructions(dtype: torch.dtype) -> bool:
    """``mkldnn_bf16_device_check`` and ``mkldnn_fp16_device_check`` (mkldnn/Utils.h)."""
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    with torch._C._DisableTorchDispatch():
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())


def _uses_mkldnn(x: Tensor, columns: int) -> bool:
    """aten/src/ATen/native/mkldnn/Matmul.cpp, ``use_mkldnn_matmul``."""
    return _uses_onednn(x.dtype, x.numel() * columns)


def _mkldnn_matmul_bytes(left: Tensor, right: Tensor) -> int:
    """mkldnn/Matmul.cpp, ``mkldnn_matmul``: copies of operands with gaps."""
    copies, operands = 0, []
    for x in (left, right):
        strides = x.stride()
        if not x.is_contiguous() and not x.mT.is_contiguous():
            copies += size_bytes(x)
            strides = (x.shape[-2] * x.shape[-1], x.shape[-1], 1)[-x.dim() :]
        operands.append((tuple(x.shape), tuple(strides)))
    scratchpad = _matmul_scratchpad_bytes(*operands, left.dtype, torch.get_num_threads())
    return copies + scratchpad


@functools.lru_cache(maxsize=4096)
def _matmul_scratchpad_bytes(
    left: tuple[tuple[int, ...], tuple[int, ...]],
    right: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    threads: int,
) -> int:
    """``ideep::matmul_forward::compute``: oneDNN's scratchpad; 0 where it cannot be asked."""
    sizes = (*left[0][:-1], right[0][-1])
    strides = (sizes[-2] * sizes[-1], sizes[-1], 1)[-len(sizes) :]

    def question(scope: onednn.Scope) -> int:
        primitive = scope.primitive(
            "matmul",
            scope.memory(left[0], dtype, left[1]),
            scope.memory(right[0], dtype, right[1]),
            ctypes.c_void_p(),
            scope.memory(sizes, dtype, strides),
            scope.library.attributes,
        )
        library = scope.library
        return library.size_bytes(library.query(primitive, onednn.QUERY_SCRATCHPAD))

    return onednn.ask(question, 0)


def gemm_scratchpad_bytes(
    dtype: torch.dtype,
    left: tuple[int, int],
    left_strides: tuple[int, int],
    columns: int,
    right_strides: tuple[int, int],
) -> int:
    """mkldnn/Matmul.cpp, ``mkldnn_gemm``: scratchpad of a product of matrices of a reduced type.

    Args:
        dtype: Of operands and result.
        left: Rows and columns of the left operand.
        left_strides: Of its dimensions.
        columns: Of the right operand.
        right_strides: Of its dimensions.
    """
    if not _uses_onednn(dtype, left[0] * left[1] * columns):
        return 0
    right = left[1], columns
    return _matmul_scratchpad_bytes(
        (left, left_strides), (right, right_strides), dtype, torch.get_num_threads()
    )


def _uses_onednn(dtype: torch.dtype, products: int) -> bool:
    if dtype not in (torch.bfloat16, torch.float16) or not torch.backends.mkldnn.enabled:
        return False
    return products > _SMALL_MKLDNN_PRODUCT and has_instructions(dtype)


def _product_bytes(left: Tensor, right: Tensor) -> int:
    """Copies for BLAS; mkldnn/Matmul.cpp, ``mkldnn_bf16_gemm``, takes matrices as BLAS does."""
    copies = _matrix_copies_bytes(left, right)
    if not _uses_mkldnn(left, right.shape[-1]):
        return copies
    operands = []
    for x in (left, right):
        is_taken = _is_blas_matrix(x.shape, x.stride())
        operands.append((tuple(x.shape), tuple(x.stride()) if is_taken else (x.shape[1], 1)))
    return copies + _matmul_scratchpad_bytes(*operands, left.dtype, torch.get_num_threads())


@CPU.workspace("linalg_matrix_exp")
def _exponential(call: OperatorCall) -> int:
    """LinearAlgebra.cpp, ``mexp_impl`` and ``compute_T18``: of ``parametrizations.orthogonal``.

    Scaled matrices, five powers of each and five combinations of those, beside norms and scales.
    A single matrix is told by its norm how many powers it needs, and then copied: it is taken to
    need the most.
    """
    x = call.tensor(0)
    count = math.prod(x.shape[:-2])
    if x.shape[-1] <= 1 or not count:
        return 0
    real_bytes = x.dtype.to_real().itemsize
    if count > 1:
        return 10 * size_bytes(x) + 3 * count * real_bytes
    return 12 * size_bytes(x) + 4 * real_bytes + 8


@CPU.workspace("mv")
def _mv(call: OperatorCall) -> int:
    """aten/src/ATen/native/Blas.cpp, ``addmv_out``: a contiguous matrix for BLAS."""
    matrix, vector = call.tensor(0), call.tensor(1)
    if _uses_mkldnn(matrix, 1):
        return _mkldnn_matmul_bytes(matrix, vector.unsqueeze(1))
    return _matrix_copies_bytes(matrix)


def _batched_bytes(left: Tensor, right: Tensor) -> int:
    """Operands to be conjugated as a whole; one matrix of each operand that BLAS cannot take.

    The latter where the batch is looped over.
    """
    if _uses_mkldnn(left, right.shape[2]):
        return _mkldnn_matmul_bytes(left, right)
    if left.shape[1] * left.shape[2] * right.shape[2] < _SMALL_PRODUCT:
        return 0
    total = 0
    for x in (left, right):
        if x.is_conj():
            total += size_bytes(x)
        elif not _is_blas_matrix(x.shape[1:], x.stride()[1:]):
            total += size_bytes(x) // max(1, x.shape[0])
    return total


# aten/src/ATen/native/LinearAlgebra.cpp, ``mm_out_cpu``, ``addmm_out_cpu``, whose bias is copied
# into the result, and ``bmm_out_or_baddbmm_``.
CPU.workspace("mm", "mm.out")(measure_product(0, _product_bytes))
CPU.workspace("addmm", "addmm.out", "addmm_", "_addmm_activation")(
    measure_product(1, _product_bytes)
)
CPU.workspace("bmm", "bmm.out")(measure_product(0, _batched_bytes))
CPU.workspace("baddbmm", "baddbmm.out")(measure_product(1, _batched_bytes))


@CPU.workspace("_euclidean_dist")
def _distances(call: OperatorCall) -> int:
    """aten/src/ATen/native/Distance.cpp, ``_euclidean_dist``.

    A product of both, each with a column of squared norms and one of ones.
    """
    trace = PeakTrace()
    rows = []
    for x in (call.tensor(0), call.tensor(1)):
        squares = trace.allocate(size_bytes(x))
        norms = trace.allocate(x.numel() // max(1, x.shape[-1]) * x.element_size())
        trace.free(squares)
        rows.append(norms + trace.allocate(norms))
    scaled = trace.allocate(size_bytes(call.tensor(0)))
    for x, columns in zip((call.tensor(0), call.tensor(1)), rows, strict=True):
        trace.allocate(size_bytes(x) + columns)
        trace.free(columns, scaled)
        scaled = 0
    result = trace.allocate(size_bytes(call.result))
    return trace.peak_bytes - result


# -- Grouped products, as mixture-of-experts layers call them --


@CPU.kernel("_grouped_mm")
def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The output of ``_grouped_mm``: allocated once, whatever the groups are."""
    make_output = torch._meta_registrations._create_grouped_mm_output_tensor
    output: torch.Tensor = make_output(  # type: ignore[no-untyped-call]
        mat_a, mat_b, offs, out_dtype or mat_a.dtype
    )
    return output
