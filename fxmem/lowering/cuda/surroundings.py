"""What a step on CUDA runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer

from fxmem.lowering.cuda.devices import view_devices
from fxmem.lowering.cuda.target import CUDA, GPU_DEVICE


@CUDA.surrounding
def _view_gpu() -> contextlib.AbstractContextManager[None]:
    return view_devices(GPU_DEVICE)


@CUDA.surrounding
@contextlib.contextmanager
def _update_together() -> Iterator[None]:
    """Optimizers update all parameters together where all are plain tensors on a GPU.

    ``torch/optim/optimizer.py``, ``_default_to_fused_or_foreach``: by their exact type.
    """
    plain = optimizer._foreach_supported_types
    plain.append(FakeTensor)
    try:
        yield
    finally:
        plain.remove(FakeTensor)
