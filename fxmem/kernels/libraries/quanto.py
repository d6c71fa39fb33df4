"""optimum-quanto, which packs what is a plain tensor: fake ones are, too.

Source: ``optimum/quanto/tensor/weights/qbits.py`` and ``optimum/quanto/tensor/qtensor.py``, 0.2.7.
"""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fxmem.kernels.cuda.gpu import CUDA
from fxmem.kernels.registry import CPU
from fxmem.patching import patch
from fxmem.tracing.compiled import patch_when_imported

_MODULES = ("qtensor", "weights.qbits", "weights.tinygemm.qbits", "weights.awq.qbits")
"""Modules that ask whether ``type(data) is torch.Tensor``."""


def _type_of(value: Any) -> type:
    return torch.Tensor if type(value) is FakeTensor else type(value)


def _take_fakes(module: ModuleType) -> contextlib.AbstractContextManager[None]:
    return patch({module: {"type": _type_of}})


for _target in (CPU, CUDA):
    for _module in _MODULES:
        _name = f"optimum.quanto.tensor.{_module}"
        _target.context(functools.partial(patch_when_imported, _name, _take_fakes))
