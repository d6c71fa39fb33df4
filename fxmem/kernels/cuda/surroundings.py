"""What a step on CUDA runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from fxmem.kernels.cuda.devices import view_devices
from fxmem.kernels.cuda.target import CUDA, GPU_DEVICE, current_gpu

_to_copy = torch.ops.aten._to_copy.default


@CUDA.kernel(_to_copy)
def _copy_constant(tensor: Tensor, **kwargs: Any) -> Any:
    """A copy of what has a known value takes the device of that value, which is the host."""
    device = kwargs.get("device")
    if device is None or getattr(tensor, "constant", None) is None:
        return NotImplemented
    result = _to_copy(tensor, **kwargs)
    result.fake_device = device
    result.constant = None  # what PyTorch computes from it would lie on the host again
    return result


@CUDA.surrounding
def _view_gpu() -> contextlib.AbstractContextManager[None]:
    return view_devices(GPU_DEVICE)


@CUDA.surrounding
@contextlib.contextmanager
def _answer_capability() -> Iterator[None]:
    """Code that chooses kernels itself (transformers' ``_can_use_grouped_mm``) asks for it."""
    real = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: current_gpu().capability
    try:
        yield
    finally:
        torch.cuda.get_device_capability = real


@CUDA.surrounding
@contextlib.contextmanager
def _update_together() -> Iterator[None]:
    """Optimizers update all parameters together where all are plain tensors on a GPU.

    ``torch/optim/optimizer.py``, ``_default_to_fused_or_foreach``: by their exact type. Likewise
    ``torch.nn.utils.clip_grad_norm_``, by ``torch/utils/_foreach_utils.py``.
    """
    lists = optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types
    for plain in lists:
        plain.append(FakeTensor)
    try:
        yield
    finally:
        for plain in lists:
            plain.remove(FakeTensor)
