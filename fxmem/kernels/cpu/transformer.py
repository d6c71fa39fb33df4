"""The fast path of transformer encoders in inference: one kernel from input to output."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxmem.kernels.arguments import argument, new_bytes, tensor
from fxmem.kernels.cpu.linear import product_scratchpad_bytes
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.tape import Tape, size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten


def _attend(
    tape: Tape, inputs: tuple[Tensor, Tensor, Tensor], heads: int, mask: object, weights: bool
) -> int:
    """aten/src/ATen/native/transformers/attention.cpp, ``native_multi_head_attention_cpu``.

    The projection of all three, then split with its bias; then, beside the split ones, the
    scores, and at last the context and its projection, which stays.
    """
    query = inputs[0]
    batch, length, width = query.shape
    rows, context = batch * length, size_bytes(query)
    scores = batch * heads * length * length * query.element_size()
    projected = _project(tape, inputs)
    split = tape.allocate(3 * context)
    tape.free(projected)
    kept = tape.allocate(scores)
    pads = [
        product_scratchpad_bytes(batch * heads, length, width // heads, length, query),
        product_scratchpad_bytes(0, rows, width, width, query),
    ]
    tape.free(tape.allocate(pads[0]))
    if isinstance(mask, Tensor):  # as bool, and softmax not in place
        bits = tape.allocate(mask.numel() if mask.dtype != torch.bool else 0)
        tape.allocate(scores)
        tape.free(kept, bits)
    if not weights:
        tape.free(scores)
    rearranged = tape.allocate(context)
    tape.allocate(context)
    tape.free(tape.allocate(pads[1]))
    tape.free(rearranged)
    if not weights:  # else the split ones live until the mean of the weights is there
        tape.free(split)
    return context


def _project(tape: Tape, inputs: tuple[Tensor, Tensor, Tensor]) -> int:
    """``qkv_projection``: one product if all are the same, else those of each joined."""
    query, key, value = inputs
    rows, width, context = query.shape[0] * query.shape[1], query.shape[2], size_bytes(query)
    parts = [3] if query is key is value else [1, 2] if key is value else [1, 1, 1]
    for part, x in zip(parts, inputs, strict=False):
        copied = tape.allocate(0 if x.is_contiguous() else context)
        tape.allocate(part * context)
        tape.free(tape.allocate(product_scratchpad_bytes(0, rows, width, part * width, x)))
        tape.free(copied)
    if len(parts) > 1:
        tape.allocate(3 * context)
        tape.free(3 * context)
    return 3 * context


@CPU.workspace(_aten._native_multi_head_attention.default)
def _attention(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """attention.cpp, ``native_multi_head_attention_cpu``: at last the mean of the weights."""
    inputs = tensor(args[0]), tensor(args[1]), tensor(args[2])
    weights = argument(args, kwargs, 10, "need_weights") is not False
    average = argument(args, kwargs, 11, "average_attn_weights") is not False
    heads = int(str(args[4]))
    tape = Tape()
    _attend(tape, inputs, heads, argument(args, kwargs, 9, "mask"), weights)
    if weights and average:
        batch, length, _ = inputs[0].shape
        tape.allocate(batch * length * length * inputs[0].element_size())
    return tape.peak_bytes - new_bytes(outputs)


def _normalize(tape: Tape, rows: int, x_bytes: int, itemsize: int) -> None:
    """``layer_norm``: the result stays, means and scales of the rows go."""
    tape.allocate(x_bytes)
    tape.free(tape.allocate(2 * rows * itemsize))


@CPU.workspace(_aten._transformer_encoder_layer_fwd.default)
def _encoder_layer(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/transformers/transformer.cpp, ``transformer_encoder_layer_forward``.

    Residuals are added in place. Activations work in place too: ``_addmm_activation`` on the CPU
    is a product and then the function.
    """
    x, norm_first, hidden = tensor(args[0]), args[8] is True, tensor(args[14]).shape[0]
    rows, width = x.shape[0] * x.shape[1], x.shape[2]
    size, itemsize = size_bytes(x), x.element_size()
    tape = Tape()
    if norm_first:
        _normalize(tape, rows, size, itemsize)
    _attend(tape, (x, x, x), int(str(args[2])), argument(args, kwargs, 18, "mask"), False)
    if norm_first:
        tape.free(size)
    _normalize(tape, rows, size, itemsize)
    if not norm_first:
        tape.free(size)
    inner = tape.allocate(rows * hidden * itemsize)
    tape.free(tape.allocate(product_scratchpad_bytes(0, rows, width, hidden, x)))
    tape.allocate(size)
    tape.free(tape.allocate(product_scratchpad_bytes(0, rows, hidden, width, x)))
    tape.free(inner)
    if not norm_first:
        _normalize(tape, rows, size, itemsize)
    return tape.peak_bytes - new_bytes(outputs)
