"""Matrix products on CUDA: copies of operands that cuBLAS cannot read.

Source: ``aten/src/ATen/native/cuda/cuBlasCommonArgs.h`` and ``Blas.cpp``. A matrix may be
transposed, or have gaps between its rows, but not between the elements of both; an expanded batch
is read as it is, an expanded row is not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxmem.kernels.cpu.linear import LINEAR_ALGEBRA, grouped_mm
from fxmem.kernels.cuda.gpu import CUDA, current_gpu, is_on_gpu
from fxmem.kernels.registry import OperatorCall, as_tensor
from fxmem.kernels.workspace import measure_product, size_bytes
from fxmem.versions.fallbacks import is_dense
from fxmem.versions.operators import aten
from fxmem.versions.release import is_release


def _has_dense_rows(x: Tensor) -> bool:
    """Returns whether rows, or columns, of dense elements follow each other, maybe with gaps."""
    (rows, columns), (by_row, by_column) = x.shape[-2:], x.stride()[-2:]
    by_columns = by_row == 1 and by_column >= max(1, rows)
    return by_columns or (by_column == 1 and by_row >= max(1, columns))


def _copy_matrices(*matrices: Tensor) -> int:
    """``prepare_matrix_for_cublas``."""
    return sum(size_bytes(x) for x in matrices if not (is_dense(x) or _has_dense_rows(x)))


def _copy_batches(*batches: Tensor) -> int:
    """``prepare_batch_matrix_for_cublas``."""
    copied = (x for x in batches if not x.is_contiguous() or 0 in x.stride()[1:])
    return sum(size_bytes(x) for x in copied if not _has_dense_rows(x))


def _copy_matrix_and_vector(matrix: Tensor, vector: Tensor) -> int:
    """A matrix without dense rows or columns, and a vector of one element seen everywhere."""
    copied = 0 if _has_dense_rows(matrix) or matrix.is_contiguous() else size_bytes(matrix)
    spread = vector.stride(0) == 0 and not vector.is_contiguous()
    return copied + (size_bytes(vector) if spread else 0)


def _list_overloads(*names: str) -> list[OpOverload]:
    """Lists operators with their overloads: ``out_dtype=`` and ``out=`` run the same kernels."""
    packets = [getattr(aten, name) for name in names]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


@CUDA.kernel("addmm.dtype", "baddbmm.dtype")
def _add_product(
    _added: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, **_factors: float
) -> Tensor:
    """Blas.cpp, ``_addmm_dtype_cuda``; PyTorch's decompositions take no ``out_dtype``."""
    return left.new_empty((*left.shape[:-1], right.shape[-1]), dtype=out_dtype)


# -- Workspaces of cuBLAS --

_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
_LT_SIZE = "CUBLASLT_WORKSPACE_SIZE"  # in KiB
_LT_BYTES = 2**20
_LT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def cublas_workspace_bytes() -> int:
    """``parseChosenWorkspaceSize``: 32 MiB from Hopper or Blackwell on, else ``:4096:2:16:8``."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get(_CONFIG, ""))
    if pairs:
        return sum(int(size_kib) * 1024 * int(count) for size_kib, count in pairs)
    majors = (9, 10, 11, 12) if is_release(since=(2, 12)) else (9,)  # pull request 175344
    large = current_gpu().capability[0] in majors
    return 4096 * 8 * 1024 if large else 4096 * 1024 * 2 + 16 * 1024 * 8


def _is_kept() -> bool:
    """From 2.15 on each call takes a workspace and gives it back (pull request 194311)."""
    return is_release(before=(2, 15)) or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def _is_unified() -> bool:
    """From 2.12 on the workspace that cuBLAS keeps is cuBLASLt's too (pull request 168175)."""
    default = "1" if is_release(since=(2, 12)) else "0"
    return _is_kept() and os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", default) == "1"


def _cublaslt_workspace_bytes(call: OperatorCall) -> int:
    """The workspace of ``addmm`` by cuBLASLt, which adds a bias of one dimension in its kernel.

    Source: ``isInputCompliesAddmmCudaLt``, before 2.10 a part of ``addmm_out_cuda_impl``, and
    ``_getWorkspaceSize`` in ``CUDABlas.cpp``.
    """
    bias, left, right = call.tensor(0), call.tensor(1), call.tensor(2)
    sizes = (*left.shape, *right.shape) if is_release(since=(2, 10)) else right.shape
    is_served = (
        bias.dim() == 1
        and bias.is_contiguous()
        and bias.shape[0] == right.shape[1]
        and call.kwargs.get("beta", 1) == 1
        and left.dtype in _LT_TYPES
        and min(sizes) > 1
    )
    return int(os.environ.get(_LT_SIZE, _LT_BYTES // 1024)) * 1024 if is_served else 0


def _register(start: int, copy: Callable[..., int], *names: str) -> None:
    """Registers products of operands that are copied, after a tensor that is added if any."""

    @CUDA.workspace(*_list_overloads(*names))
    def measure(call: OperatorCall) -> int:
        copied = copy(call.tensor(start), call.tensor(start + 1))
        return copied + (0 if _is_kept() else cublas_workspace_bytes())

    CUDA.keeper(*_list_overloads(*names))(_keep_cublas)


def _keep_cublas(call: OperatorCall) -> tuple[tuple[str, int], ...]:
    if not (_is_kept() and is_on_gpu(call.args[0])):
        return ()
    return (("cuBLAS workspace", cublas_workspace_bytes()),)


# Blas.cpp, ``mm_out_cuda``, ``bmm_out_cuda``, ``baddbmm_out_cuda_impl``, ``addmv_out_cuda``: a
# tensor that is added is copied into the result.
_register(0, _copy_matrices, "mm")
_register(0, _copy_batches, "bmm")
_register(1, _copy_batches, "baddbmm", "baddbmm_")
_register(0, _copy_matrix_and_vector, "mv")
_register(1, _copy_matrix_and_vector, "addmv", "addmv_")
_register(0, lambda *_: 0, "addbmm", "dot", "vdot")
# ``int8_gemm`` passes no workspace; until 2.14 its handle came with one.
CUDA.workspace(*_list_overloads("_int_mm"))(measure_product(0, _copy_matrices))
CUDA.keeper(*_list_overloads("_int_mm"))(_keep_cublas)


@CUDA.workspace(*_list_overloads("addmm", "addmm_", "_addmm_activation"))
def _addmm(call: OperatorCall) -> int:
    """Blas.cpp, ``addmm_out_cuda_impl``: what is added is copied into the result."""
    copies = _copy_matrices(call.tensor(1), call.tensor(2))
    own = 0 if _is_unified() else _cublaslt_workspace_bytes(call)
    if not _is_kept():
        return copies + (own or cublas_workspace_bytes())
    return copies + (own if is_release(before=(2, 9)) else 0)  # ``CUDABlas.cpp``, ``gemm_and_bias``


@CUDA.keeper(*_list_overloads("addmm", "_addmm_activation"))
def _keep_cublaslt(call: OperatorCall) -> tuple[tuple[str, int], ...]:
    """From 2.9 on cuBLASLt's own workspace is kept too (pull request 156495)."""
    kept = _keep_cublas(call)
    has_own = kept and is_release(since=(2, 9)) and not _is_unified()
    own = _cublaslt_workspace_bytes(call) if has_own else 0
    return (*kept, ("cuBLASLt workspace", own)) if own else kept


# -- Grouped products, as mixture-of-experts layers call them --

_grouped_mm = aten._grouped_mm.default
_CUTLASS_MAJORS = (9, 10)
_ALIGNMENT_BYTES = 16

CUDA.unmodelled[_grouped_mm] = (
    "in bfloat16 on compute capability 9 and 10 CUTLASS takes less than 100 KiB for tensor maps"
)


@CUDA.kernel(_grouped_mm)
def _multiply_groups(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``create_grouped_gemm_output_tensor``: rows padded to 16 bytes; of any floating dtype."""
    sizes = grouped_mm(mat_a, mat_b, offs, bias, out_dtype).shape
    dtype = out_dtype or mat_a.dtype
    alignment = _ALIGNMENT_BYTES // dtype.itemsize
    padded = -(-sizes[-1] // alignment) * alignment
    strides = (padded, 1) if len(sizes) == 2 else (sizes[1] * padded, padded, 1)
    return torch.empty_strided(sizes, strides, dtype=dtype, device=mat_a.device)


@CUDA.keeper(_grouped_mm)
def _keep_cublas_of_groups(call: OperatorCall) -> tuple[tuple[str, int], ...]:
    is_cutlass = current_gpu().capability[0] in _CUTLASS_MAJORS
    if is_cutlass and all(as_tensor(arg).dtype == torch.bfloat16 for arg in call.args[:2]):
        return ()
    return _keep_cublas(call)


# -- Linear algebra that libraries serve --

CUDA.leave_out(
    "cuSOLVER or MAGMA takes a workspace and copies in column order",
    *LINEAR_ALGEBRA,
)
CUDA.leave_out(
    "cuFFT takes a workspace, and clones by dimension", "_fft_r2c", "_fft_c2r", "_fft_c2c"
)
CUDA.leave_out(
    "scratch of a kernel that few models run",
    "kthvalue", "median", "median.dim", "nanmedian", "nanmedian.dim", "soft_margin_loss",
    "soft_margin_loss_backward",
    "count_nonzero", "count_nonzero.dim_IntList", "cummax", "cummin", "embedding_renorm_",
    "multi_margin_loss", "multi_margin_loss_backward", "multilabel_margin_loss_forward",
    "multilabel_margin_loss_backward", "put", "put_", "searchsorted.Tensor", "bucketize.Tensor",
    "_trilinear",
)  # fmt: skip
CUDA.leave_out(
    "a workspace that depends on the kernel which the library picks",
    "_sparse_mm_reduce_impl",
    "_scaled_mm",
    "_scaled_grouped_mm",
)
