"""Mixed dtypes that eager refuses and fake kernels let pass.

The step of a model in bfloat16 that makes a float32 tensor on its way fails where it runs, so it
must fail in the analysis too.
"""

from __future__ import annotations

from typing import Any

import torch

from fxmem.specs import strip_torch

_aten = torch.ops.aten
_LOW = (torch.bfloat16, torch.float16)
# Arguments of one dtype; the tests hold this against what real tensors do.
_ALIKE = {
    _aten.mm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.mv.default: (0, 1),
    _aten.addmv.default: (1, 2),
    _aten.convolution.default: (0, 1),
}
# Input and parameters: alike, or parameters in float32 beside a low-precision input
# (``check_mixed_data_type`` in ``aten/src/ATen/native/cpu/mixed_data_type.h``).
_NORMS = {
    _aten.native_batch_norm.default: (0, 1),
    _aten.native_layer_norm.default: (0, 2),
    _aten.native_group_norm.default: (0, 1),
}


def check_dtypes(func: Any, args: tuple[Any, ...]) -> None:
    """Refuses what the operator would refuse.

    Args:
        func: The operator.
        args: Its arguments.

    Raises:
        RuntimeError: Two of them must be of one dtype and are not.
    """
    pair = _ALIKE.get(func)
    if pair is not None:
        first, second = args[pair[0]].dtype, args[pair[1]].dtype
        if first != second:
            raise RuntimeError(
                f"two tensors must have the same dtype, but got {strip_torch(first)} and "
                f"{strip_torch(second)}"
            )
        return
    pair = _NORMS.get(func)
    if pair is not None and args[pair[1]] is not None:
        first, second = args[pair[0]].dtype, args[pair[1]].dtype
        if first != second and not (first in _LOW and second == torch.float32):
            raise RuntimeError(
                f"an input of {strip_torch(first)} cannot be normalized with parameters of "
                f"{strip_torch(second)}"
            )
