"""The fast paths of attention modules in inference on CUDA: composites of other operators.

Source: ``native_multi_head_attention_cuda`` in
``aten/src/ATen/native/transformers/cuda/attention.cu``, and
``transformer_encoder_layer_forward`` in ``transformers/transformer.cpp``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from fxmem.kernels.common.in_place import linear
from fxmem.kernels.cuda.attention.backends import AttentionCall
from fxmem.kernels.cuda.attention.dispatch import choose, scaled_dot_product_attention
from fxmem.kernels.cuda.gpu import CUDA, is_on_gpu
from fxmem.kernels.registry import OperatorCall
from fxmem.kernels.workspace import size_bytes
from fxmem.versions.operators import aten

_MAX_PERSISTENT = 1024
_MAX_PERSISTENT_BYTES = 4096


@CUDA.function(torch._native_multi_head_attention)
def native_multi_head_attention(*args: Any) -> tuple[Tensor, Tensor | None]:
    """``native_multi_head_attention_cuda``.

    Without a mask one tensor attends to itself by the fused kernels, if one takes the heads of the
    inputs before they are projected; else scores are made. The split projections live to the end,
    and the context takes the place of the queries among them.
    """
    if not is_on_gpu(args[0]):
        return torch._native_multi_head_attention(*args)
    query, key, value, _embed_dim, num_head = args[:5]
    qkv_weight, qkv_bias, proj_weight, proj_bias = args[5:9]
    mask, need_weights, average_attn_weights, mask_type = args[9:]
    if query is key is value and not need_weights:
        split = _split_heads(query, num_head)
        backend = choose(AttentionCall(split, split, split, mask))
        if mask is None and backend is not SDPBackend.MATH:
            projected = linear(query, qkv_weight, qkv_bias)
            parts = [_split_heads(part, num_head) for part in projected.chunk(3, -1)]
            attended = scaled_dot_product_attention(*parts)
            joined = attended.transpose(1, 2).reshape(query.shape[0], -1, query.shape[2])
            return linear(joined, proj_weight, proj_bias), None
    projected = _project(query, key, value, qkv_weight)
    if not projected.numel():
        return torch.empty_like(query), None
    q, k, v = torch._transform_bias_rescale_qkv(projected, qkv_bias, num_head)
    del projected
    weights = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(2, 1))  # ``bmm_nt``
    weights = weights.view(*q.shape[:3], k.shape[2])
    if mask is None:  # ``masked_softmax``: in place
        weights = aten._softmax.out(weights, weights.dim() - 1, False, out=weights)
    else:
        bits = mask.to(torch.bool)
        weights = torch._masked_softmax(weights, bits, weights.dim() - 1, mask_type)
        del bits
    context = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1), out=q.flatten(0, 1)).view_as(q)
    if not need_weights:
        del weights
    result = _join(context, proj_weight, proj_bias)
    if not need_weights:
        return result, None
    if average_attn_weights:
        weights = weights.sum(1)
        weights /= num_head
    return result, weights


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], -1, heads, x.shape[2] // heads).transpose(1, 2)


def _project(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """``qkv_projection``: one product if all are the same, else one for each, joined."""
    if query is key is value:
        return torch.matmul(query, weight.t())
    width = query.shape[2]
    inputs = [query, key] if key is value else [query, key, value]
    sizes = [width, 2 * width] if key is value else [width] * 3
    parts = torch.split_with_sizes(weight, sizes)
    products = [torch.matmul(x, part.t()) for x, part in zip(inputs, parts, strict=True)]
    return torch.cat(products, 2)


def _join(context: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``transform0213_gemm_nt_bias``."""
    joined = context.transpose(1, 2).contiguous().flatten(2)
    result: Tensor = linear(joined.flatten(0, 1), weight, bias)
    return result.view(*joined.shape[:2], -1)


@CUDA.function(torch._transformer_encoder_layer_fwd)
def transformer_encoder_layer(*args: Any) -> Tensor:
    """``transformer_encoder_layer_forward``: residuals are added in place."""
    if not is_on_gpu(args[0]):
        return torch._transformer_encoder_layer_fwd(*args)
    src, embed_dim, num_heads, *attention = args[:7]
    use_gelu, norm_first, eps, *norms = args[7:14]
    norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2 = norms
    ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2, mask, mask_type = args[14:]
    if not src.numel():
        return torch.empty_like(src)
    x = src
    if norm_first:
        x = torch.layer_norm(x, [embed_dim], norm_weight_1, norm_bias_1, eps, True)
    x = native_multi_head_attention(
        x, x, x, embed_dim, num_heads, *attention, mask, False, True, mask_type
    )[0]
    x.add_(src)
    if not norm_first:
        x = torch.layer_norm(x, [embed_dim], norm_weight_1, norm_bias_1, eps, True)
    residual = x
    if norm_first:
        x = torch.layer_norm(x, [embed_dim], norm_weight_2, norm_bias_2, eps, True)
    flat, weight = x.flatten(0, 1), ffn_weight_1.t()
    hidden = torch._addmm_activation(ffn_bias_1, flat, weight, use_gelu=use_gelu)
    x = torch.addmm(ffn_bias_2, hidden, ffn_weight_2.t()).view_as(x)
    del hidden, flat
    x.add_(residual)
    if not norm_first:
        x = torch.layer_norm(x, [embed_dim], norm_weight_2, norm_bias_2, eps, True)
    return x


@CUDA.kernel("_transform_bias_rescale_qkv")
def _transform(qkv: Tensor, qkv_bias: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """``transform_bias_rescale_qkv_cuda``: the three lie in one tensor."""
    batch, length, width = qkv.shape
    sizes = (3, batch, num_heads, length, width // 3 // num_heads)
    return torch.unbind(qkv_bias.new_empty(sizes))


@CUDA.kernel("_masked_softmax")
def _masked_softmax_outputs(
    input: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None
) -> Tensor:
    """aten/src/ATen/native/cuda/SoftMax.cu, ``masked_softmax_cuda``."""
    return torch.empty_like(input)


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
