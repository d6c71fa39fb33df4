"""Backward operators that leave out gradients which nobody wants.

PyTorch's fake kernels make an unwanted gradient's tensor all the same for the operators here; for
the others with an ``output_mask`` (convolution, layer norm, group norm) they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxmem.lowering.functions import CPU

_batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default


@CPU.kernel(_batch_norm_backward)
def batch_norm_backward(*args: Any, output_mask: Sequence[bool] | None = None) -> Any:
    """aten/src/ATen/native/Normalization.cpp, ``batch_norm_backward_cpu_template``."""
    mask = args[-1] if output_mask is None else output_mask
    arguments = args[:-1] if output_mask is None else args
    gradients: tuple[Tensor, ...] = _batch_norm_backward(*arguments, mask)
    wanted = zip(gradients, mask, strict=True)
    return tuple(gradient if is_wanted else None for gradient, is_wanted in wanted)
