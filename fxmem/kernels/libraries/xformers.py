"""xformers, whose attention is PyTorch's own kernels, or flash-attn's, called from Python.

Source: ``xformers/ops/fmha/flash.py``, ``cutlass.py`` and ``_cpp_lib.py``, 0.0.35. The package's
compiled library is not loaded: what is in it beside attention is refused by the package.
"""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from fxmem.kernels.cuda.gpu import CUDA
from fxmem.patching import patch
from fxmem.tracing.compiled import patch_when_imported

CUDA.python_kernels["xformers_flash"] = contextlib.nullcontext


def _say_built(library: ModuleType) -> contextlib.AbstractContextManager[None]:
    return patch({library: {"_built_with_cuda": True}})


def _take_fakes(cutlass: Any) -> contextlib.AbstractContextManager[None]:
    """Lets a mask be a fake tensor, which is none of the types that the package lists."""
    name = "SUPPORTED_ATTN_BIAS_TYPES"
    operators = (cutlass.FwOp, cutlass.BwOp)
    return patch({op: {name: (*getattr(op, name), FakeTensor)} for op in operators})


CUDA.context(functools.partial(patch_when_imported, "xformers._cpp_lib", _say_built))
CUDA.context(functools.partial(patch_when_imported, "xformers.ops.fmha.cutlass", _take_fakes))
