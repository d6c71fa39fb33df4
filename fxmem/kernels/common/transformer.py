"""The fast paths of attention modules in inference: composites of other operators.

Source: ``native_multi_head_attention_cpu`` in ``aten/src/ATen/native/transformers/attention.cpp``,
``native_multi_head_attention_cuda`` in ``transformers/cuda/attention.cu``, and
``transformer_encoder_layer_forward`` in ``transformers/transformer.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.common.in_place import linear
from fxmem.kernels.registry import ANY
from fxmem.versions.operators import aten

_DEFAULTS = (None, True, True, None)
"""Defaults of the mask and of the arguments after it."""


def attend_by_scores(*args: Any) -> tuple[Tensor, Tensor | None]:
    """``native_multi_head_attention_cpu``, and the same of CUDA where no fused kernel serves.

    The split projections live to the end, and the context takes the place of the queries among
    them.
    """
    query, key, value, _embed_dim, num_head = args[:5]
    qkv_weight, qkv_bias, proj_weight, proj_bias = args[5:9]
    rest = (*args[9:], *_DEFAULTS[len(args) - 9 :])
    mask, need_weights, average_attn_weights, mask_type = rest
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


def run_encoder_layer(attend: Callable[..., Any], *args: Any) -> Tensor:
    """``transformer_encoder_layer_forward``: residuals are added in place."""
    src, embed_dim, num_heads, *attention = args[:7]
    use_gelu, norm_first, eps, *norms = args[7:14]
    norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2 = norms
    ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2 = args[14:18]
    mask, mask_type = (*args[18:], None, None)[:2]
    if not src.numel():
        return torch.empty_like(src)
    x = src
    if norm_first:
        x = torch.layer_norm(x, [embed_dim], norm_weight_1, norm_bias_1, eps, True)
    x = attend(x, x, x, embed_dim, num_heads, *attention, mask, False, True, mask_type)[0]
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


@ANY.kernel("_transform_bias_rescale_qkv")
def _transform(qkv: Tensor, qkv_bias: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """``transform_bias_rescale_qkv_cpu``, ``..._cuda``: the three lie in one tensor."""
    batch, length, width = qkv.shape
    sizes = (3, batch, num_heads, length, width // 3 // num_heads)
    return torch.unbind(qkv_bias.new_empty(sizes))


@ANY.kernel("_masked_softmax")
def _masked_softmax_outputs(
    input: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None
) -> Tensor:
    """aten/src/ATen/native/SoftMax.cpp, cuda/SoftMax.cu, ``masked_softmax_cpu``, ``..._cuda``."""
    return torch.empty_like(input)
