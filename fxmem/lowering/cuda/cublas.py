"""The workspaces that PyTorch gives to cuBLAS and cuBLASLt, and keeps.

Source: ``aten/src/ATen/cuda/CublasHandlePool.cpp``. A handle belongs to a thread, and backward
runs in one of its own; the workspace of a handle and a stream is allocated at their first use, by
the caching allocator, and stays. From PyTorch 2.15 on it is allocated for each call.
"""

from __future__ import annotations

import os
import re

import torch

from fxmem.lowering.arguments import tensor
from fxmem.lowering.cuda.target import CUDA, current_gpu, is_on_gpu
from fxmem.lowering.target import Arguments

_aten = torch.ops.aten
_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
_LT_CONFIG = "CUBLASLT_WORKSPACE_SIZE"
_LARGE_MAJORS = (9, 10, 11, 12)


def cublas_workspace_bytes() -> int:
    """``parseChosenWorkspaceSize``: 32 MiB from Hopper on, else ``:4096:2:16:8``."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get(_CONFIG, ""))
    if pairs:
        return sum(int(size_kib) * 1024 * int(count) for size_kib, count in pairs)
    large = current_gpu().capability[0] in _LARGE_MAJORS
    return 4096 * 8 * 1024 if large else 4096 * 1024 * 2 + 16 * 1024 * 8


def cublaslt_workspace_bytes() -> int:
    """``parseCUDABlasLtWorkspaceSize``: 1 MiB."""
    text = os.environ.get(_LT_CONFIG, "")
    return int(text) * 1024 if text.isdigit() else 1024 * 1024


@CUDA.keeper(
    _aten.mm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.addbmm.default,
    _aten.mv.default,
    _aten.addmv.default,
    _aten.dot.default,
    _aten.vdot.default,
    _aten._int_mm.default,
)
def _keep_cublas(args: Arguments) -> tuple[tuple[str, int], ...]:
    if not is_on_gpu(args[0]):
        return ()
    return (("cuBLAS workspace", cublas_workspace_bytes()),)


@CUDA.keeper(_aten.addmm.default, _aten._addmm_activation.default)
def _keep_for_addmm(args: Arguments) -> tuple[tuple[str, int], ...]:
    """``aten/src/ATen/native/cuda/Blas.cpp``, ``isInputCompliesAddmmCudaLt``: a bias goes along.

    The handle of cuBLASLt is that of cuBLAS, whose workspace comes with it.
    """
    if not is_on_gpu(args[0]):
        return ()
    bias, first, second = (tensor(arg) for arg in args[:3])
    takes_bias = (
        bias.dim() == 1
        and bias.is_contiguous()
        and bias.shape[0] == second.shape[1]
        and first.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        and min(*first.shape, *second.shape) > 1
    )
    kept: tuple[tuple[str, int], ...] = (("cuBLAS workspace", cublas_workspace_bytes()),)
    if takes_bias and os.environ.get("DISABLE_ADDMM_CUDA_LT") != "1":
        kept += (("cuBLASLt workspace", cublaslt_workspace_bytes()),)
    return kept
