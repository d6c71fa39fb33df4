"""Scaled dot product attention on the CPU: the blocks that each thread works in."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from fxmem.kernels.common.transformer import attend_by_scores, run_encoder_layer
from fxmem.kernels.composites import measure_composite
from fxmem.kernels.cpu.linear import gemm_scratchpad_bytes
from fxmem.kernels.registry import CPU, OperatorCall, as_tensor
from fxmem.kernels.workspace import size_bytes

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

    The block of scores times the incoming gradient, the keys, and the queries; the latter two are
    scaled, by a number that oneDNN is handed in a tensor.
    """
    ask, head = functools.partial(gemm_scratchpad_bytes, query.dtype), grad.shape[3]
    scores, turned = (columns, 1), (1, columns)
    incoming = ask((columns, rows), turned, head, (grad.shape[1] * head, 1))
    keys = ask((rows, columns), scores, head, (key.stride(2), 1))
    queries = ask((columns, rows), turned, head, (query.stride(2), 1))
    scaled = max(keys, queries)
    return max(incoming, scaled + _SCALE_BYTES if scaled else 0)


# -- Fast paths of attention modules in inference --


@CPU.workspace("_native_multi_head_attention")
def _attention(call: OperatorCall) -> int:
    """attention.cpp, ``native_multi_head_attention_cpu``."""
    return measure_composite(CPU, attend_by_scores, call)


@CPU.workspace("_transformer_encoder_layer_fwd")
def _encoder_layer(call: OperatorCall) -> int:
    """aten/src/ATen/native/transformers/transformer.cpp, ``transformer_encoder_layer_forward``."""
    run = functools.partial(run_encoder_layer, attend_by_scores)
    return measure_composite(CPU, run, call)
