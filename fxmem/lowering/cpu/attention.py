"""Scaled dot product attention on the CPU: the blocks that each thread works in."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxmem.lowering.arguments import tensor
from fxmem.lowering.cpu.target import CPU
from fxmem.lowering.tape import size_bytes
from fxmem.lowering.target import Arguments

_aten = torch.ops.aten

# cpu/FlashAttentionKernel.cpp, ``flash_attention_kernel_impl``: block of queries by their number.
_QUERY_BLOCKS = ((768, 256), (192, 64), (0, 32))
_KEY_BLOCK = 512


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
    scores in float, and two in a reduced type; the calling thread's sums of a block's rows.
    """
    grad, query, key = (tensor(value) for value in args[:3])
    rows, columns = _blocks(query.shape[2], key.shape[2])
    itemsize = query.element_size()
    wide = max(itemsize, 4)
    block = 2 * rows * columns * (wide + (itemsize if itemsize < wide else 0))
    copied = 0 if grad.transpose(1, 2).is_contiguous() else size_bytes(grad)
    return copied + torch.get_num_threads() * block + rows * wide
