"""Scaled dot product attention on the CPU: the blocks that each thread works in."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from fxmem.kernels.arguments import tensor
from fxmem.kernels.cpu.linear import gemm_scratchpad_bytes
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.tape import size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten

# cpu/FlashAttentionKernel.cpp, ``flash_attention_kernel_impl``: block of queries by their number.
_QUERY_BLOCKS = ((768, 256), (192, 64), (0, 32))
_KEY_BLOCK = 512
_SCALE_BYTES = 4


def _blocks(queries: int, keys: int) -> tuple[int, int]:
    """Queries and keys of one block."""
    block = next(size for least, size in _QUERY_BLOCKS if queries >= least)
    return min(block, queries), min(_KEY_BLOCK, keys)


@CPU.workspace(_aten._scaled_dot_product_flash_attention_for_cpu.default)
def _flash(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, ``cpu_flash_attention``.

    Per thread: a block of scores, maxima and sums of its rows, and a block of the output, in
    float; reduced types add a block of scores in their own type.
    """
    query, key = tensor(args[0]), tensor(args[1])
    rows, columns = _blocks(query.shape[2], key.shape[2])
    itemsize = query.element_size()
    wide = max(itemsize, 4)
    thread = (rows * columns + 2 * rows + rows * query.shape[3]) * wide
    if itemsize < wide:
        thread += rows * columns * itemsize
    return torch.get_num_threads() * thread


@CPU.workspace(_aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _flash_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """FlashAttentionKernel.cpp, ``cpu_flash_attention_backward``.

    The gradient is made contiguous in the order batch, row, head; per thread two blocks of
    scores in float, and two in a reduced type; the calling thread's sums of a block's rows, and
    the scratchpad of its products.
    """
    grad, query, key = (tensor(value) for value in args[:3])
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
