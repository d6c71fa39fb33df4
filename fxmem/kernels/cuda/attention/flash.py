"""Flash attention's buffers on CUDA: parts of split keys, and accumulators of gradients.

Source: ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``. The outputs are those
of PyTorch's own fake kernels.
"""

from __future__ import annotations

import ctypes
import math

from torch import Tensor

from fxmem.graph import Blocks
from fxmem.kernels.cuda.attention.backends import read_settings
from fxmem.kernels.cuda.gpu import CUDA, current_gpu
from fxmem.kernels.registry import OperatorCall, as_tensor
from fxmem.kernels.workspace import BlockTrace, size_bytes

_ROWS = 128
_FLOAT = 4
_MAX_SPLITS = 128


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def _round_head_dim(head_dim: int) -> int:
    return round_up(head_dim, 32 if head_dim <= 128 else 64)


@CUDA.workspace("_scaled_dot_product_flash_attention")
def _forward(call: OperatorCall) -> Blocks:
    """``mha_fwd``: for each part of the keys the logarithm of its sum and a result, in float.

    With dropout keys are not split.
    """
    query, key = call.tensor(0), call.tensor(1)
    if call.get(3, "dropout_p"):
        return ()
    batch, heads, queries, head_dim = query.shape
    if queries == 1 and heads > key.shape[1]:  # the heads of a group become its queries
        queries, heads = heads // key.shape[1], key.shape[1]
    splits = count_splits(
        batch * heads * -(-queries // 64),
        current_gpu().multiprocessors * 2,
        -(-key.shape[2] // (256 if head_dim <= 64 else 128 if head_dim <= 128 else 64)),
    )
    trace, sums_bytes = BlockTrace(), splits * batch * heads * queries * _FLOAT
    if splits > 1:
        trace.allocate(sums_bytes)
        trace.allocate(sums_bytes * _round_head_dim(head_dim))
    return trace.finish()


def count_splits(blocks: int, processors: int, key_blocks: int) -> int:
    """``num_splits_heuristic``: the fewest parts of the keys with 85 % of the best use.

    Of ``processors`` pieces that may run at once, for ``blocks`` pieces of work without splitting.
    """
    if blocks >= _single(_single(0.8) * processors):
        return 1
    most = min(_MAX_SPLITS, processors, key_blocks)
    uses = {}
    for splits in range(1, most + 1):
        if splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1)):
            waves = _single(_single(blocks * splits) / processors)
            uses[splits] = _single(waves / math.ceil(waves))
    best = max(uses.values(), default=0.0)
    return next((n for n, use in uses.items() if use >= 0.85 * best), 1)


def _single(number: float) -> float:
    """Rounded to single precision, in which PyTorch computes this."""
    return ctypes.c_float(number).value


@CUDA.workspace("_scaled_dot_product_flash_attention_backward")
def _backward(call: OperatorCall) -> Blocks:
    """``_flash_attention_backward``, ``mha_bwd``.

    The gradient and the result in the order batch, row, head; the gradients; per row a sum, and
    the gradient of the query in float; where heads share keys, gradients of keys and values for
    every head.
    """
    grad, query, key, _value, result = (as_tensor(value) for value in call.args[:5])
    batch, heads, queries, head_dim = query.shape
    parts = 1
    gpu = current_gpu()
    if read_settings(gpu).is_deterministic:
        parts = -(-gpu.multiprocessors // (batch * heads))
    sums_bytes = batch * heads * round_up(queries, _ROWS) * _FLOAT
    trace = BlockTrace()
    trace.allocate(_copy_bytes(grad))
    trace.allocate(_copy_bytes(result))
    for gradient in range(3):
        trace.allocate_result(gradient)
    trace.allocate(sums_bytes)
    trace.allocate(sums_bytes * parts * _round_head_dim(head_dim))
    if key.shape[1] != heads:
        for _ in ("keys", "values"):
            trace.allocate(batch * heads * key.shape[2] * head_dim * query.element_size())
    return trace.finish()


def _copy_bytes(x: Tensor) -> int:
    return 0 if x.transpose(1, 2).is_contiguous() else size_bytes(x)
