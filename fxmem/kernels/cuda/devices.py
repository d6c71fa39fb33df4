"""Copies of constants to the GPU, and optimizers that update all parameters there together."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from fxmem.kernels.cuda.gpu import CUDA
from fxmem.patching import patch
from fxmem.versions.operators import aten

_to_copy = aten._to_copy.default


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


@CUDA.context
def _update_together() -> contextlib.AbstractContextManager[None]:
    """Optimizers update all parameters together where all are plain tensors on a GPU.

    ``torch/optim/optimizer.py``, ``_default_to_fused_or_foreach``: by their exact type; as does
    ``torch.nn.utils.clip_grad_norm_``, by ``torch/utils/_foreach_utils.py``.
    """
    name, modules = "_foreach_supported_types", (optimizer, _foreach_utils)
    return patch({module: {name: [*vars(module)[name], FakeTensor]} for module in modules})
