"""Scaled dot product attention on CUDA: the operator that is taken, and the composite around it.

Source: ``aten/src/ATen/native/transformers/attention.cpp`` of PyTorch 2.13. The operators bring
their own autograd formulas, which decide what is saved; what a backend computes with is made
ready in composite functions, whose locals live until they return.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from fxmem.kernels.autocast.policies import follow_autocast
from fxmem.kernels.common.in_place import run_in_place
from fxmem.kernels.cuda.attention.backends import (
    AttentionCall,
    choose_backend,
    explain_math,
    read_settings,
)
from fxmem.kernels.cuda.gpu import CUDA, current_gpu, current_state, is_on_gpu
from fxmem.kernels.cuda.pointwise import dropout
from fxmem.kernels.registry import OperatorCall
from fxmem.versions.operators import aten

_HALVES = (torch.float16, torch.bfloat16)
_ALIGNMENT = 8
"""Elements that a row of flash attention's inputs, or of a mask, is a multiple of."""

CUDA.leave_out(
    "a fused attention that is not called through scaled_dot_product_attention",
    *("_cudnn_attention_forward", "_cudnn_attention_backward"),
)


@CUDA.function(
    functional.scaled_dot_product_attention,
    aten.scaled_dot_product_attention,
    aten.scaled_dot_product_attention.default,
)
@follow_autocast(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
    """``scaled_dot_product_attention``; empty inputs, and what any device refuses, go to PyTorch.

    Raises:
        RuntimeError: If no backend that is enabled takes the inputs, as on a GPU.
    """
    call = AttentionCall(*args, **kwargs)
    mask = call.attn_mask
    is_chosen_by_device = (
        is_on_gpu(call.query)
        and all(x.numel() and x.dim() >= 2 for x in call.inputs)
        and len({(x.dtype, x.device) for x in call.inputs}) == 1
        and (mask is None or mask.dtype in (torch.bool, torch.float32, call.query.dtype))
    )
    if not is_chosen_by_device:
        run = functional.scaled_dot_product_attention
        return run_in_place(run, *args, **kwargs)  # type: ignore[no-any-return]
    backend = choose(call)
    mask = _make_additive(mask, call.query.dtype)
    result: Tensor
    if backend is SDPBackend.CUDNN_ATTENTION:
        result = aten._scaled_dot_product_cudnn_attention(
            *call.inputs, mask, call.requires_grad, call.dropout_p, call.is_causal, False,
            scale=call.scale,
        )[0]  # fmt: skip
    elif backend is SDPBackend.FLASH_ATTENTION:
        # ``pad_last_dim``; the scale is that of the head dimension before it is padded.
        head_dim = call.query.shape[-1]
        missing = -head_dim % _ALIGNMENT
        padded = [torch.constant_pad_nd(x, [0, missing]) if missing else x for x in call.inputs]
        factor = 1 / math.sqrt(head_dim) if call.scale is None else call.scale
        result = aten._scaled_dot_product_flash_attention(
            *padded, call.dropout_p, call.is_causal, False, scale=factor
        )[0]
        result = result[..., :head_dim] if missing else result
    elif backend is SDPBackend.EFFICIENT_ATTENTION:
        if mask is not None:
            mask = _align_mask(mask, call)
        result = aten._scaled_dot_product_efficient_attention(
            *call.inputs, mask, call.requires_grad, call.dropout_p, call.is_causal,
            scale=call.scale,
        )[0]  # fmt: skip
    else:
        state = current_state()
        state.remarks[explain_math(call, state.gpu, read_settings(state.gpu))] = None
        result = _run_math(call, mask)
    return result


@CUDA.function(torch._fused_sdp_choice)
def _fused_sdp_choice(*args: Any, **kwargs: Any) -> int:
    """``_fused_sdp_choice_cuda``: the number of the backend."""
    call = AttentionCall(*args, **kwargs)
    if not is_on_gpu(call.query):
        return torch._fused_sdp_choice(*args, **kwargs)
    return int(choose(call).value)


def choose(call: AttentionCall) -> SDPBackend:
    """The backend that the current GPU takes with this process's settings.

    Raises:
        RuntimeError: If none that is enabled takes the inputs, as on a GPU.
    """
    gpu = current_gpu()
    backend = choose_backend(call, gpu, read_settings(gpu))
    if backend is None:
        raise RuntimeError("No available kernel. Aborting execution.")
    return backend


def _make_additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``convert_boolean_attn_mask``."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    outside = torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device)
    return torch.where(mask, 0.0, outside)


def _align_mask(mask: Tensor, call: AttentionCall) -> Tensor:
    """``preprocess_mask``, ``pad_bias``: where rows begin at odd places they are padded.

    One whose rows have the right length already, but not the right strides, gets 8 more columns.
    """
    if mask.dtype != call.query.dtype:
        raise RuntimeError("invalid dtype for bias - should match query's dtype")
    if any(stride % _ALIGNMENT for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        padded = torch.constant_pad_nd(mask, [0, _ALIGNMENT - length % _ALIGNMENT])
        mask = padded[..., :length]
    return mask.expand(*call.query.shape[:3], call.key.shape[2])


def _run_math(call: AttentionCall, mask: Tensor | None) -> Tensor:
    """``_scaled_dot_product_attention_math``: halves are computed with in float."""
    dtype, cuda = call.query.dtype, torch.backends.cuda
    is_kept: bool = cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    wide = torch.float32 if dtype in _HALVES and not is_kept else dtype
    wide_query, wide_key, wide_value = (x.to(wide) for x in call.inputs)
    scale = 1 / math.sqrt(wide_query.shape[-1]) if call.scale is None else call.scale
    factor = math.sqrt(abs(scale))
    query = aten.mul.Scalar(wide_query, -factor if scale < 0 else factor)
    if call.is_causal:
        if mask is not None:
            raise RuntimeError(
                "_scaled_dot_product_attention: "
                "Explicit attn_mask should not be set when is_causal=True"
            )
        sizes = (query.shape[-2], wide_key.shape[-2])
        visible = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
        mask = _make_additive(visible, query.dtype)
        del visible
    key, value = _repeat_heads(call, query, wide_key, wide_value)
    scores = torch.matmul(query, aten.mul.Scalar(key.transpose(-2, -1), factor))
    if mask is not None:
        scores.add_(mask)
    scores = torch._safe_softmax(scores, -1)
    if call.dropout_p > 0:
        scores = dropout(scores, call.dropout_p, True)
    # Returned beside the result, and evaluated first.
    weights = scores.to(dtype)
    result = torch.matmul(scores, value).to(dtype)
    del weights
    return result


def _repeat_heads(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """``pre_process_group_query_attention_input``."""
    if not call.enable_gqa:
        return key, value
    heads, key_heads, value_heads = (x.shape[-3] for x in (query, key, value))
    if heads == key_heads == value_heads:
        return key, value
    if heads % key_heads or heads % value_heads:
        raise RuntimeError(
            "Number of heads in key and value must divide the number of heads in query"
        )
    return (
        key.repeat_interleave(heads // key_heads, -3),
        value.repeat_interleave(heads // value_heads, -3),
    )


@CUDA.workspace("_safe_softmax")
def _safe_softmax(call: OperatorCall) -> int:
    """``_safe_softmax``: where the scores are minus infinity, and in which rows all are.

    Beside them a zero, which is written to such rows of the result.
    """
    x, result = call.tensor(0), call.result
    rows = x.numel() // max(1, x.shape[int(str(call.args[1]))] if x.dim() else 1)
    return x.numel() + rows + result.element_size()
