"""Scaled dot product attention on the CPU: the blocks that each thread works in."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from fxmem.kernels.cpu.linear import gemm_scratchpad_bytes, product_scratchpad_bytes
from fxmem.kernels.registry import CPU, OperatorCall, as_tensor
from fxmem.kernels.workspace import PeakTrace, size_bytes

# cpu/FlashAttentionKernel.cpp, ``flash_attention_kernel_impl``: block of queries by their number.
_QUERY_BLOCKS = ((768, 256), (192, 64), (0, 32))
_KEY_BLOCK = 512
_SCALE_BYTES = 4


def _blocks(queries: int, keys: int) -> tuple[int, int]:
    block = next(size for least, size in _QUERY_BLOCKS if queries >= least)
    return min(block, queries), min(_KEY_BLOCK, keys)


@CPU.workspace("_scaled_dot_product_flash_attention_for_cpu")
def _flash(call: OperatorCall) -> int:
    """aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, ``cpu_flash_attention``.

    Per thread: a block of scores, maxima and sums of its rows, and a block of the output, in
    float; reduced types add a block of scores in their own type. Where the processor multiplies
    tiles, keys and values are packed for it, with odd lengths padded.
    """
    query, key = call.tensor(0), call.tensor(1)
    rows, columns = _blocks(query.shape[2], key.shape[2])
    batch, heads, keys, head = key.shape
    itemsize = query.element_size()
    wide = max(itemsize, 4)
    thread = (rows * columns + 2 * rows + rows * head) * wide
    packed = 0
    if itemsize < wide:
        reduced = rows * columns
        if _packs(query, key, bool(call.kwargs.get("is_causal", (*call.args, 0.0, False)[4]))):
            tail = (keys - 1) % columns + 1
            padded = (keys - tail) // columns * _even(columns) + _even(tail)
            packed = batch * heads * (_even(head) * keys + padded * head) * itemsize
            reduced = rows * _even(columns) + columns * head
            reduced += rows * _even(head) if head % 2 else 0
        thread += reduced * itemsize
    return torch.get_num_threads() * thread + packed


def _packs(query: Tensor, key: Tensor, is_causal: bool) -> bool:
    """``cpu_flash_attention``, ``need_pack``, and ``could_pack`` (CPUBlas.cpp)."""
    tile = "_is_amx_tile_supported" if query.dtype == torch.bfloat16 else "_is_amx_fp16_supported"
    least, ratio = (64, 4) if query.dtype == torch.bfloat16 else (16, 1)
    queries, keys = query.shape[2], key.shape[2]
    if min(queries, keys) < least or not getattr(torch.cpu, tile, bool)():
        return False
    rows, _ = _blocks(queries, keys)
    threads = torch.get_num_threads()
    blocks = query.shape[0] * query.shape[1] * math.ceil(queries / rows)
    products = math.ceil(blocks / threads) * rows * (min(queries, keys) if is_causal else keys)
    return products >= ratio * key.shape[0] * key.shape[1] * keys


def _even(size: int) -> int:
    return size + size % 2


@CPU.workspace("_scaled_dot_product_flash_attention_for_cpu_backward")
def _flash_backward(call: OperatorCall) -> int:
    """FlashAttentionKernel.cpp, ``cpu_flash_attention_backward``.

    The gradient is made contiguous in the order batch, row, head; per thread two blocks of
    scores in float, and two in a reduced type; the calling thread's sums of a block's rows, and
    the scratchpad of its products.
    """
    grad, query, key = (as_tensor(value) for value in call.args[:3])
    rows, columns = _blocks(query.shape[2], key.shape[2])
    itemsize = query.element_size()
    wide = max(itemsize, 4)
    block = 2 * rows * columns * (wide + (itemsize if itemsize < wide else 0))
    copied = 0 if grad.transpose(1, 2).is_contiguous() else size_bytes(grad)
    sums = rows * wide + _products_bytes(grad, query, key, rows, columns)
    return copied + torch.get_num_threads() * block + sums


def _products_bytes(grad: Tensor, query: Tensor, key: Tensor, rows: int, columns: int) -> int:
    """Products of a reduced type that add to a gradient; ``mkldnn_gemm`` where oneDNN takes them.

    The block of scores times what came in, the keys, and the queries; the latter two are scaled,
    by a number that oneDNN is handed in a tensor.
    """
    ask, head = functools.partial(gemm_scratchpad_bytes, query.dtype), grad.shape[3]
    scores, turned = (columns, 1), (1, columns)
    incoming = ask((columns, rows), turned, head, (grad.shape[1] * head, 1))
    keys = ask((rows, columns), scores, head, (key.stride(2), 1))
    queries = ask((columns, rows), turned, head, (query.stride(2), 1))
    scaled = max(keys, queries)
    return max(incoming, scaled + _SCALE_BYTES if scaled else 0)


# -- Fast paths of attention modules in inference --


def _attend(
    trace: PeakTrace, inputs: tuple[Tensor, Tensor, Tensor], heads: int, mask: object, weights: bool
) -> int:
    """aten/src/ATen/native/transformers/attention.cpp, ``native_multi_head_attention_cpu``.

    The projection of all three, then split with its bias; then, beside the split ones, the
    scores, and at last the context and its projection, which stays.
    """
    query = inputs[0]
    batch, length, width = query.shape
    rows, context = batch * length, size_bytes(query)
    scores = batch * heads * length * length * query.element_size()
    projected = _project(trace, inputs)
    split = trace.allocate(3 * context)
    trace.free(projected)
    kept = trace.allocate(scores)
    pads = [
        product_scratchpad_bytes(batch * heads, length, width // heads, length, query),
        product_scratchpad_bytes(0, rows, width, width, query),
    ]
    trace.free(trace.allocate(pads[0]))
    if isinstance(mask, Tensor):  # as bool, and softmax not in place
        bits = trace.allocate(mask.numel() if mask.dtype != torch.bool else 0)
        trace.allocate(scores)
        trace.free(kept, bits)
    if not weights:
        trace.free(scores)
    rearranged = trace.allocate(context)
    trace.allocate(context)
    trace.free(trace.allocate(pads[1]))
    trace.free(rearranged)
    if not weights:  # else the split ones live until the mean of the weights is there
        trace.free(split)
    return context


def _project(trace: PeakTrace, inputs: tuple[Tensor, Tensor, Tensor]) -> int:
    """``qkv_projection``: one product if all are the same, else one for each, joined."""
    query, key, value = inputs
    rows, width, context = query.shape[0] * query.shape[1], query.shape[2], size_bytes(query)
    parts = [3] if query is key is value else [1, 2] if key is value else [1, 1, 1]
    for part, x in zip(parts, inputs, strict=False):
        copied = trace.allocate(0 if x.is_contiguous() else context)
        trace.allocate(part * context)
        trace.free(trace.allocate(product_scratchpad_bytes(0, rows, width, part * width, x)))
        trace.free(copied)
    if len(parts) > 1:
        trace.allocate(3 * context)
        trace.free(3 * context)
    return 3 * context


@CPU.workspace("_native_multi_head_attention")
def _attention(call: OperatorCall) -> int:
    """attention.cpp, ``native_multi_head_attention_cpu``: at last the mean of the weights."""
    inputs = call.tensor(0), call.tensor(1), call.tensor(2)
    weights = call.get(10, "need_weights") is not False
    average = call.get(11, "average_attn_weights") is not False
    heads = int(str(call.args[4]))
    trace = PeakTrace()
    _attend(trace, inputs, heads, call.get(9, "mask"), weights)
    if weights and average:
        batch, length, _ = inputs[0].shape
        trace.allocate(batch * length * length * inputs[0].element_size())
    return trace.peak_bytes - call.result_bytes


def _normalize(trace: PeakTrace, rows: int, x_bytes: int, itemsize: int) -> None:
    """``layer_norm``: the result stays, means and scales of the rows go."""
    trace.allocate(x_bytes)
    trace.free(trace.allocate(2 * rows * itemsize))


@CPU.workspace("_transformer_encoder_layer_fwd")
def _encoder_layer(call: OperatorCall) -> int:
    """aten/src/ATen/native/transformers/transformer.cpp, ``transformer_encoder_layer_forward``.

    Residuals are added in place. Activations work in place too: ``_addmm_activation`` on the CPU
    is a product and then the function.
    """
    x, norm_first, hidden = call.tensor(0), call.args[8] is True, call.tensor(14).shape[0]
    rows, width = x.shape[0] * x.shape[1], x.shape[2]
    size, itemsize = size_bytes(x), x.element_size()
    trace = PeakTrace()
    if norm_first:
        _normalize(trace, rows, size, itemsize)
    _attend(trace, (x, x, x), int(str(call.args[2])), call.get(18, "mask"), False)
    if norm_first:
        trace.free(size)
    _normalize(trace, rows, size, itemsize)
    if not norm_first:
        trace.free(size)
    inner = trace.allocate(rows * hidden * itemsize)
    trace.free(trace.allocate(product_scratchpad_bytes(0, rows, width, hidden, x)))
    trace.allocate(size)
    trace.free(trace.allocate(product_scratchpad_bytes(0, rows, hidden, width, x)))
    trace.free(inner)
    if not norm_first:
        _normalize(trace, rows, size, itemsize)
    return trace.peak_bytes - call.result_bytes
