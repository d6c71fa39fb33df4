"""cuDNN's attention: its results, and the workspace of its frontend.

Source: ``aten/src/ATen/native/cudnn/MHA.cpp``; cudnn-frontend,
``include/cudnn_frontend/node/scaled_dot_product_flash_attention.h``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxmem.graph import Blocks
from fxmem.kernels.cuda.gpu import CUDA
from fxmem.kernels.registry import OperatorCall
from fxmem.kernels.workspace import BlockTrace, size_bytes
from fxmem.versions.operators import aten

_FLOAT = 4
_forward = aten._scaled_dot_product_cudnn_attention.default
_backward = aten._scaled_dot_product_cudnn_attention_backward.default

CUDA.unmodelled[_forward] = CUDA.unmodelled[_backward] = (
    "cuDNN may take a workspace, which it chooses at run time"
)


@CUDA.kernel(_forward)
def _outputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``_cudnn_attention_forward``, ``run_cudnn_SDP_fprop``: statistics for backward only.

    Seed and offset lie on the GPU, with dropout or without.
    """
    sizes = (*query.shape[:3], value.shape[3])
    # ``alloc_with_matching_layout``: the dimensions in the query's order in memory.
    order = sorted(range(4), key=lambda dim: (not query.stride(dim), query.stride(dim)))
    strides, stride = [0] * 4, 1
    for dim in order:
        strides[dim] = stride
        stride *= sizes[dim]
    is_like_query = tuple(query.shape) == sizes
    result = torch.empty_like(query) if is_like_query else query.new_empty_strided(sizes, strides)
    statistics = None
    if compute_log_sumexp:
        statistics = query.new_empty((*sizes[:3], 1), dtype=torch.float32)
    state = [query.new_empty((), dtype=torch.int64) for _ in range(2)]
    return result, statistics, None, None, query.shape[2], key.shape[2], *state, None


@CUDA.workspace(_backward)
def _backward_buffers(call: OperatorCall) -> Blocks:
    """``CompositeSDPABackwardNode``: the query's gradient in float, and a sum for each row.

    A gradient whose last dimension is strided is copied (``permute_to_matching_layout``).
    """
    grad, query = call.tensor(0), call.tensor(1)
    rows = query.numel() // query.shape[3]
    trace = BlockTrace()
    trace.allocate(0 if grad.stride(-1) == 1 else size_bytes(grad))
    trace.allocate(rows * (query.shape[3] + 1) * _FLOAT)
    return trace.finish()
