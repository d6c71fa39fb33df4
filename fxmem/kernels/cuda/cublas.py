"""The workspaces that PyTorch gives to cuBLAS, and keeps.

Source: ``aten/src/ATen/cuda/CublasHandlePool.cpp``. A handle belongs to a thread, and backward
runs in one of its own; the workspace of a handle and a stream is allocated at their first use, by
the caching allocator, and stays. cuBLASLt is given the same one (``getCUDABlasLtWorkspace``, unless
``TORCH_CUBLASLT_UNIFIED_WORKSPACE=0``). From PyTorch 2.15 on it is allocated for each call.
"""

from __future__ import annotations

import os
import re

import torch

from fxmem.kernels.cuda.target import CUDA, current_gpu, is_on_gpu
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
_LARGE_MAJORS = (9, 10, 11, 12)


def cublas_workspace_bytes() -> int:
    """``parseChosenWorkspaceSize``: 32 MiB from Hopper on, else ``:4096:2:16:8``."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get(_CONFIG, ""))
    if pairs:
        return sum(int(size_kib) * 1024 * int(count) for size_kib, count in pairs)
    large = current_gpu().capability[0] in _LARGE_MAJORS
    return 4096 * 8 * 1024 if large else 4096 * 1024 * 2 + 16 * 1024 * 8


@CUDA.keeper(
    _aten.mm.default,
    _aten.addmm.default,
    _aten._addmm_activation.default,
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
