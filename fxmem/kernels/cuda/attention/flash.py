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
from fxmem.kernels.workspace import BlockTrace, dense_bytes

_ROWS = 128
_FLOAT = 4
_MAX_SPLITS = 128


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def round_head_dim(head_dim: int) -> int:
    """The head dimension of the kernel's own buffers."""
    return round_up(head_dim, 32 if head_dim <= 128 else 64)


@CUDA.workspace("_scaled_dot_product_flash_attention")
def _forward(call: OperatorCall) -> Blocks:
    query, key = call.tensor(0), call.tensor(1)
    batch, heads, queries, _ = query.shape
    work = (batch, heads, key.shape[1], queries, key.shape[2])
    return _split_keys(query, work, call.get(3, "dropout_p"))


@CUDA.workspace("_flash_attention_forward")
def _forward_of_rows(call: OperatorCall) -> Blocks:
    """As ``torch.nn.attention.varlen`` and xformers call it; keys of sequences are not split."""
    query, key = call.tensor(0), call.tensor(1)
    if call.get(3, "cum_seq_q") is not None:
        return ()
    batch, queries, heads, _ = query.shape
    work = (batch, heads, key.shape[2], queries, key.shape[1])
    return _split_keys(query, work, call.get(7, "dropout_p"))


def _split_keys(query: Tensor, work: tuple[int, ...], dropout_p: float | None) -> Blocks:
    """``mha_fwd``: for each part of the keys the logarithm of its sum and a result, in float.

    With dropout keys are not split.
    """
    batch, heads, key_heads, queries, keys = work
    head_dim = query.shape[-1]
    if dropout_p:
        return ()
    if queries == 1 and heads > key_heads:  # the heads of a group become its queries
        queries, heads = heads // key_heads, key_heads
    splits = count_key_splits(batch * heads, queries, keys, head_dim)
    trace, sums_bytes = BlockTrace(), splits * batch * heads * queries * _FLOAT
    if splits > 1:
        trace.allocate(sums_bytes)
        trace.allocate(sums_bytes * round_head_dim(head_dim))
    return trace.finish()


def count_key_splits(work: int, queries: int, keys: int, head_dim: int) -> int:
    """``set_params_splitkv``: parts of the keys, for pairs of batch and head."""
    columns = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
    processors = current_gpu().multiprocessors * 2
    return count_splits(work * -(-queries // 64), processors, -(-keys // columns))


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
    """In the order batch, row, head, which is how the kernel takes the gradient and the result."""
    grad, query, key, _value, result = (as_tensor(x).transpose(1, 2) for x in call.args[:5])
    rows = query.shape[0] * round_up(query.shape[1], _ROWS)
    return _differentiate(grad, query, key, result, rows, query.shape[0])


@CUDA.workspace("_flash_attention_backward")
def _backward_of_rows(call: OperatorCall) -> Blocks:
    """A tensor of sequences has 128 rows more for each."""
    grad, query, key, _value, result = (as_tensor(x) for x in call.args[:5])
    starts = call.get(6, "cum_seq_q")
    if starts is None:
        rows, batch = query.shape[0] * round_up(query.shape[1], _ROWS), query.shape[0]
    else:
        batch = starts.numel() - 1
        rows = query.shape[0] + batch * _ROWS
    return _differentiate(grad, query, key, result, rows, batch)


def _differentiate(
    grad: Tensor, query: Tensor, key: Tensor, result: Tensor, rows: int, batch: int
) -> Blocks:
    """``_flash_attention_backward``, ``mha_bwd``.

    Dense copies of the gradient and the result; the gradients; per row a sum, and the gradient of
    the query in float; where heads share keys, gradients of keys and values for every head.
    """
    heads, head_dim = query.shape[-2:]
    parts = 1
    gpu = current_gpu()
    if read_settings(gpu).is_deterministic:
        parts = -(-gpu.multiprocessors // (batch * heads))
    sums_bytes = rows * heads * _FLOAT
    trace = BlockTrace()
    trace.allocate(dense_bytes(grad))
    trace.allocate(dense_bytes(result))
    for gradient in range(3):
        trace.allocate_result(gradient)
    trace.allocate(sums_bytes)
    trace.allocate(sums_bytes * parts * round_head_dim(head_dim))
    if key.shape[-2] != heads:
        for _ in ("keys", "values"):
            trace.allocate(key.numel() // key.shape[-2] * heads * query.element_size())
    return trace.finish()
