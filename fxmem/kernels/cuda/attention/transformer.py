"""The fast paths of attention modules in inference on CUDA (:mod:`..common.transformer`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from fxmem.kernels.common.in_place import linear
from fxmem.kernels.common.transformer import attend_by_scores, run_encoder_layer
from fxmem.kernels.cuda.attention.backends import AttentionCall
from fxmem.kernels.cuda.attention.dispatch import choose, scaled_dot_product_attention
from fxmem.kernels.cuda.gpu import CUDA, is_on_gpu
from fxmem.kernels.registry import OperatorCall
from fxmem.kernels.workspace import size_bytes

_MAX_PERSISTENT = 1024
_MAX_PERSISTENT_BYTES = 4096


@CUDA.function(torch._native_multi_head_attention)
def native_multi_head_attention(*args: Any) -> tuple[Tensor, Tensor | None]:
    """``native_multi_head_attention_cuda``.

    Without a mask one tensor attends to itself by the fused kernels, if one takes the heads of the
    inputs before they are projected; else scores are made.
    """
    if not is_on_gpu(args[0]):
        return torch._native_multi_head_attention(*args)
    query, key, value, _embed_dim, num_head = args[:5]
    qkv_weight, qkv_bias, proj_weight, proj_bias, mask, need_weights = args[5:11]
    if query is key is value and not need_weights:
        split = _split_heads(query, num_head)
        backend = choose(AttentionCall(split, split, split, mask))
        if mask is None and backend is not SDPBackend.MATH:
            projected = linear(query, qkv_weight, qkv_bias)
            parts = [_split_heads(part, num_head) for part in projected.chunk(3, -1)]
            attended = scaled_dot_product_attention(*parts)
            joined = attended.transpose(1, 2).reshape(query.shape[0], -1, query.shape[2])
            return linear(joined, proj_weight, proj_bias), None
    return attend_by_scores(*args)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], -1, heads, x.shape[2] // heads).transpose(1, 2)


@CUDA.function(torch._transformer_encoder_layer_fwd)
def transformer_encoder_layer(*args: Any) -> Tensor:
    """``transformer_encoder_layer_forward``."""
    if not is_on_gpu(args[0]):
        return torch._transformer_encoder_layer_fwd(*args)
    return run_encoder_layer(native_multi_head_attention, *args)


@CUDA.workspace("_masked_softmax")
def _masked_softmax(call: OperatorCall) -> int:
    """``masked_softmax_cuda``: rows too long for its kernel are filled, then go to softmax.

    Beside the filled scores lies a result that is not used.
    """
    scores, mask = call.tensor(0), call.tensor(1)
    length = scores.shape[-1]
    if call.args[3] == 0:  # one for all sequences and heads; one for each sequence is known
        mask = mask.expand(scores.shape)
    is_long = length > _MAX_PERSISTENT or length * scores.element_size() > _MAX_PERSISTENT_BYTES
    return 2 * size_bytes(scores) if is_long or not mask.is_contiguous() else 0
