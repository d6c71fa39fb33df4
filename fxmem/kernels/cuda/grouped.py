"""Grouped matrix multiplication on CUDA, as mixture-of-experts layers call it.

Source: ``aten/src/ATen/native/cuda/GroupedBlas.cpp`` (``_grouped_mm_cuda``): CUTLASS multiplies
bfloat16 on Hopper and on data-center Blackwell, cuBLAS the rest, group by group
(``aten/src/ATen/native/GroupedMMUtils.h``, ``_grouped_mm_fallback``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxmem.kernels.arguments import tensor
from fxmem.kernels.cpu.grouped import grouped_mm
from fxmem.kernels.cuda.cublas import cublas_workspace_bytes
from fxmem.kernels.cuda.target import CUDA, current_gpu
from fxmem.kernels.target import Arguments

_grouped_mm = torch.ops.aten._grouped_mm.default
_CUTLASS_MAJORS = (9, 10)
_ALIGNMENT_BYTES = 16

CUDA.unmodelled[_grouped_mm] = (
    "in bfloat16 on compute capability 9 and 10, CUTLASS's tensor maps of less than 100 KiB"
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
def _keep_cublas(args: Arguments) -> tuple[tuple[str, int], ...]:
    is_cutlass = current_gpu().capability[0] in _CUTLASS_MAJORS
    if is_cutlass and all(tensor(arg).dtype == torch.bfloat16 for arg in args[:2]):
        return ()
    return (("cuBLAS workspace", cublas_workspace_bytes()),)
