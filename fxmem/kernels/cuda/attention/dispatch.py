"""Scaled dot product attention on CUDA: the operator that is taken, and what is made around it.

Source: ``aten/src/ATen/native/transformers/attention.cpp`` of PyTorch 2.13. The operators bring
their own autograd formulas, which decide what is saved; what a backend computes with is made
ready in composite functions, whose locals live until they return.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from fxmem.errors import TraceError
from fxmem.kernels.autocast.policies import follow_autocast
from fxmem.kernels.common.in_place import run_in_place
from fxmem.kernels.cuda.attention.backends import AttentionCall, choose_backend, read_settings
from fxmem.kernels.cuda.gpu import CUDA, current_gpu, is_on_gpu
from fxmem.kernels.cuda.pointwise import dropout
from fxmem.kernels.registry import Call

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_ALIGNMENT = 8
"""Elements that a row of flash attention's inputs, or of a mask, is a multiple of."""

CUDA.leave_out(
    "a fused attention that is not called through scaled_dot_product_attention",
    *("_flash_attention_forward", "_flash_attention_backward"),
    *("_efficient_attention_forward", "_efficient_attention_backward"),
    *("_cudnn_attention_forward", "_cudnn_attention_backward"),
)


@CUDA.function(
    functional.scaled_dot_product_attention,
    _aten.scaled_dot_product_attention,
    _aten.scaled_dot_product_attention.default,
)
@follow_autocast(_aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention``.

    Raises:
        RuntimeError: If no backend that is enabled takes the inputs, as on a GPU.
    """
    call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if not is_on_gpu(query) or not _is_chosen_by_device(call):
        result: Tensor = run_in_place(
            functional.scaled_dot_product_attention,
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return result
    backend = choose(call)
    mask = _make_additive(attn_mask, query.dtype)
    if backend is SDPBackend.CUDNN_ATTENTION:
        return _run_cudnn(call, mask, scale)
    if backend is SDPBackend.FLASH_ATTENTION:
        return _run_flash(call, scale)
    if backend is SDPBackend.EFFICIENT_ATTENTION:
        return _run_efficient(call, mask, scale)
    return _run_math(call, mask, scale)


@CUDA.function(torch._fused_sdp_choice)
def _fused_sdp_choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """``_fused_sdp_choice_cuda``: the number of the backend."""
    if not is_on_gpu(query):
        return torch._fused_sdp_choice(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    return int(choose(call).value)


def _is_chosen_by_device(call: AttentionCall) -> bool:
    """Tells whether the device chooses: not for empty inputs, nor for what is refused on any."""
    inputs, mask = call.inputs, call.mask
    return (
        all(x.numel() and x.dim() >= 2 for x in inputs)
        and len({x.dtype for x in inputs}) == 1
        and len({x.device for x in inputs}) == 1
        and (mask is None or mask.dtype in (torch.bool, torch.float32, call.query.dtype))
    )


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


def _run_flash(call: AttentionCall, scale: float | None) -> Tensor:
    """The scale is that of the head dimension before it is padded, the result is cut back."""
    head_dim = call.query.shape[-1]
    padded = [_pad_last_dim(x) for x in call.inputs]
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    result: Tensor = _aten._scaled_dot_product_flash_attention(
        *padded, call.dropout, call.is_causal, False, scale=factor
    )[0]
    return result if result.shape[-1] == head_dim else result[..., :head_dim]


def _pad_last_dim(x: Tensor) -> Tensor:
    """``pad_last_dim``."""
    missing = -x.shape[-1] % _ALIGNMENT
    return torch.constant_pad_nd(x, [0, missing]) if missing else x


def _run_efficient(call: AttentionCall, mask: Tensor | None, scale: float | None) -> Tensor:
    query, key, value = call.inputs
    if mask is not None:
        if mask.dtype != query.dtype:
            raise RuntimeError("invalid dtype for bias - should match query's dtype")
        mask = _align_mask(mask).expand(*query.shape[:3], key.shape[2])
    result: Tensor = _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, call.requires_grad, call.dropout, call.is_causal, scale=scale
    )[0]
    return result


def _align_mask(mask: Tensor) -> Tensor:
    """``preprocess_mask``, ``pad_bias``: where rows begin at odd places they are padded.

    One whose rows have the right length already, but not the right strides, gets 8 more columns.
    """
    if not any(stride % _ALIGNMENT for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return torch.constant_pad_nd(mask, [0, _ALIGNMENT - length % _ALIGNMENT])[..., :length]


def _run_cudnn(call: AttentionCall, mask: Tensor | None, scale: float | None) -> Tensor:
    result: Tensor = _aten._scaled_dot_product_cudnn_attention(
        *call.inputs, mask, call.requires_grad, call.dropout, call.is_causal, False, scale=scale
    )[0]
    return result


def _run_math(call: AttentionCall, mask: Tensor | None, scale: float | None) -> Tensor:
    """``_scaled_dot_product_attention_math``: halves are computed with in float."""
    dtype = call.query.dtype
    wide_query, wide_key, wide_value = (_widen(x) for x in call.inputs)
    factor = math.sqrt(1 / math.sqrt(wide_query.shape[-1]) if scale is None else abs(scale))
    sign = -1 if scale is not None and scale < 0 else 1
    query = _aten.mul.Scalar(wide_query, sign * factor)
    if call.is_causal:
        mask = _make_causal_mask(mask, query, wide_key)
    key, value = _repeat_heads(call, query, wide_key, wide_value)
    scores = torch.matmul(query, _aten.mul.Scalar(key.transpose(-2, -1), factor))
    if mask is not None:
        scores.add_(mask)
    scores = torch._safe_softmax(scores, -1)
    if call.dropout > 0:
        scores = dropout(scores, call.dropout, True)
    # Returned beside the result, and evaluated first.
    weights = scores.to(dtype)
    result = torch.matmul(scores, value).to(dtype)
    del weights
    return result


def _widen(x: Tensor) -> Tensor:
    cuda: Any = torch.backends.cuda
    is_kept = cuda.fp16_bf16_reduction_math_sdp_allowed()
    return x.to(torch.float32) if x.dtype in _HALVES and not is_kept else x


def _make_causal_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is not None:
        raise RuntimeError(
            "_scaled_dot_product_attention: "
            "Explicit attn_mask should not be set when is_causal=True"
        )
    sizes = (query.shape[-2], key.shape[-2])
    mask = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
    return _make_additive(mask, query.dtype)


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
def _safe_softmax(call: Call) -> int:
    """``_safe_softmax``: where the scores are minus infinity, and in which rows all are.

    Beside them a zero, which is written to such rows of the result.
    """
    x, result = call.tensor(0), call.result
    rows = x.numel() // max(1, x.shape[int(str(call.args[1]))] if x.dim() else 1)
    return x.numel() + rows + result.element_size()


# -- Flexible attention --

_MODULE = "torch.nn.attention.flex_attention"
_FIRST_CALL = "_validate_no_nested_tensors"


@CUDA.context
@contextlib.contextmanager
def refuse_flex_attention() -> Iterator[None]:
    """Has ``torch.nn.attention.flex_attention.flex_attention`` say that it is not analysed.

    It hands itself to the compiler, which cannot run a step on fake tensors; the errors of that
    name neither.
    """
    module: Any = sys.modules.get(_MODULE)
    first = getattr(module, _FIRST_CALL, None)
    if first is None:
        yield
        return
    setattr(module, _FIRST_CALL, _refuse)
    try:
        yield
    finally:
        setattr(module, _FIRST_CALL, first)


def _refuse(*_inputs: Any) -> None:
    raise TraceError(
        "flex_attention is compiled to kernels whose memory is not known before",
        hint="analyse with torch.nn.functional.scaled_dot_product_attention in its place",
    )
