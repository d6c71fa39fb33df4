"""Grouped matrix multiplication, as mixture-of-experts layers call it.

Source: ``aten/src/ATen/native/GroupedMMUtils.h`` (``create_grouped_gemm_output_tensor``) and
``aten/src/ATen/native/LinearAlgebra.cpp`` (``_grouped_mm_fallback``): the CPU multiplies group by
group into one output, of any floating dtype. PyTorch's fake kernel checks what the CUDA kernel
asks for (bfloat16, strides of 16 bytes) and refuses the rest.
"""

from __future__ import annotations

import torch
from torch._meta_registrations import _create_grouped_mm_output_tensor

from fxmem.kernels.cpu.target import CPU


@CPU.kernel(torch.ops.aten._grouped_mm.default)
def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The output of ``_grouped_mm``: allocated once, whatever the groups are."""
    output: torch.Tensor = _create_grouped_mm_output_tensor(  # type: ignore[no-untyped-call]
        mat_a, mat_b, offs, out_dtype or mat_a.dtype
    )
    return output
