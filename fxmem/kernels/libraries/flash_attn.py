"""flash-attn: its compiled functions, and the functions of the package where that is not installed.

Source: https://github.com/Dao-AILab/flash-attention, 2.8.3: ``csrc/flash_attn/flash_api.cpp``,
``flash_attn/flash_attn_interface.py``, ``flash_attn/bert_padding.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxmem.kernels.cuda.attention.flash import count_key_splits, round_head_dim, round_up
from fxmem.kernels.cuda.gpu import CUDA, current_gpu
from fxmem.kernels.stand_ins import MissingNameError, find_stand_in, register_stand_in

_VERSION = "2.8.3"
_ROWS = 128
_PADDED = 8

CUDA.python_kernels["flash_attn"] = contextlib.nullcontext


# -- flash_attn_2_cuda, compiled --


def fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, slopes: Any, dropout_p: float, *more: Any
) -> list[Tensor]:
    """``mha_fwd``: the result, logarithms of sums, probabilities if asked for, a random state."""
    batch, queries, heads, _ = q.shape
    sums = q.new_empty(batch, heads, queries, dtype=torch.float32)
    made = _attend(q, k, out, sums, (batch, queries, k.shape[1]), dropout_p, is_returned=more[5])
    return [*made, _make_state(q)]


def varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lengths: Tensor, *more: Any
) -> list[Tensor]:
    """``mha_varlen_fwd``; keys are split only in decoding."""
    queries, keys, dropout_p = more[5:8]
    sums = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    sizes = (lengths.numel() - 1, queries, keys)
    made = _attend(q, k, out, sums, sizes, dropout_p, more[14], is_split=queries == 1)
    return [*made, _make_state(q)]


def _make_state(q: Tensor) -> Tensor:
    return q.new_empty(2, dtype=torch.int64)


def _attend(
    q: Tensor,
    k: Tensor,
    out: Tensor | None,
    sums: Tensor,
    sizes: tuple[int, int, int],
    dropout_p: float,
    is_returned: bool = False,
    is_split: bool = True,
) -> list[Tensor]:
    batch, queries, keys = sizes
    heads, head_dim = q.shape[-2:]
    out = torch.empty_like(q) if out is None else out
    rounded = (round_up(queries, _ROWS), round_up(keys, _ROWS)) if is_returned else ()
    probabilities = q.new_empty((batch, heads, *rounded) if is_returned else 0)
    if queries == 1 and heads > k.shape[-2]:  # the heads of a group become its queries
        queries, heads = heads // k.shape[-2], k.shape[-2]
    if is_split and not dropout_p:
        splits = count_key_splits(batch * heads, queries, keys, head_dim)
        if splits > 1:
            held = [q.new_empty(splits, batch, heads, queries, dtype=torch.float32)]
            held.append(held[0].new_empty(*held[0].shape, round_head_dim(head_dim)))
    return [out, sums, probabilities]


def fwd_kvcache(q: Tensor, k_cache: Tensor, *_more: Any) -> list[Tensor]:
    """``mha_fwd_kvcache``."""
    batch, queries, heads, _ = q.shape
    sums = q.new_empty(batch, heads, queries, dtype=torch.float32)
    return _attend(q, k_cache, None, sums, (batch, queries, k_cache.shape[1]), 0.0)[:2]


def bwd(*arguments: Any) -> list[Tensor]:
    """``mha_bwd``: gradients, given or new, and the sums of their products with the result."""
    _gradient, q, k, v, _out, _sums, *given = arguments[:9]
    batch, queries, heads, _ = q.shape
    rows = (batch, round_up(queries, _ROWS))
    sums = q.new_empty(batch, heads, rows[1], dtype=torch.float32)
    return _differentiate(q, k, v, given, sums, rows, batch, is_deterministic=arguments[16])


def varlen_bwd(*arguments: Any) -> list[Tensor]:
    """``mha_varlen_bwd``: each sequence has 128 rows more."""
    _gradient, q, k, v, _out, _sums, *given = arguments[:9]
    batch = arguments[9].numel() - 1
    rows = q.shape[0] + _ROWS * batch
    sums = q.new_empty(q.shape[1], rows, dtype=torch.float32)
    return _differentiate(q, k, v, given, sums, (rows,), batch, is_deterministic=arguments[21])


def _differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Sequence[Tensor | None],
    sums: Tensor,
    rows: tuple[int, ...],
    batch: int,
    is_deterministic: bool,
) -> list[Tensor]:
    heads, head_dim = q.shape[-2:]
    gradients = [
        torch.empty_like(x) if made is None else made
        for x, made in zip((q, k, v), given, strict=True)
    ]
    parts = -(-current_gpu().multiprocessors // (batch * heads)) if is_deterministic else 1
    held = [q.new_empty(parts, *rows, heads, round_head_dim(head_dim), dtype=torch.float32)]
    if k.shape[-2] != heads:
        held += [x.new_empty(*x.shape[:-2], heads, head_dim) for x in (k, v)]
    return [*gradients, sums]


_COMPILED = {f.__name__: f for f in (fwd, varlen_fwd, fwd_kvcache, bwd, varlen_bwd)}
register_stand_in("flash_attn_2_cuda", _COMPILED)


# -- flash_attn, where it is not installed --


class FlashAttnFunc(torch.autograd.Function):
    """The classes of ``flash_attn_interface.py``: of q, k and v; of q and kv; of qkv.

    ``lengths`` are where sequences begin and how long the longest are, or empty; ``options`` the
    arguments that follow in the compiled functions.
    """

    @staticmethod
    def forward(ctx: Any, lengths: Any, options: Any, is_returned: bool, *packed: Tensor) -> Any:
        head_dim = packed[0].shape[-1]
        padding = (0, -head_dim % _PADDED)
        parts = [F.pad(x, padding) if padding[1] else x for x in _unpack(packed)]
        q, k, v = map(_make_dense, parts)
        dropout_p, *rest, slopes, _deterministic = options
        returned = is_returned and dropout_p > 0
        if lengths:
            starts, longest = lengths[:2], lengths[2:]
            begin = (None, *starts, None, None, None, slopes, *longest, dropout_p, rest[0], False)
            made = varlen_fwd(q, k, v, *begin, *rest[1:], returned, None)
        else:
            made = fwd(q, k, v, None, slopes, dropout_p, *rest, returned, None)
        out, sums, probabilities, state = made
        ctx.save_for_backward(*parts, out, sums, state, *lengths[:2])
        ctx.count, ctx.longest, ctx.options = len(packed), lengths[2:], options
        result = out[..., :head_dim]
        return (result, sums, probabilities) if is_returned else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_others: Any) -> Any:
        *parts, out, sums, state = (saved := ctx.saved_tensors)[:6]  # which a checkpoint gives once
        starts = saved[6:]
        head_dim = gradient.shape[-1]
        padding = (0, -head_dim % _PADDED)
        packed = _pack_empty(parts, ctx.count)
        gradient = F.pad(gradient, padding) if padding[1] else gradient
        dropout_p, *rest, slopes, deterministic = ctx.options
        made = (*map(_make_dense, (gradient, *parts, out)), sums, *_unpack(packed))
        if starts:
            begin = (*starts, slopes, *ctx.longest, dropout_p, rest[0], False)
            varlen_bwd(*made, *begin, *rest[1:], deterministic, None, state)
        else:
            bwd(*made, slopes, dropout_p, *rest, deterministic, None, state)
        return None, None, None, *(x[..., :head_dim] for x in packed)


def _unpack(packed: Sequence[Tensor]) -> list[Tensor]:
    """Queries, keys and values, which may be one tensor along its third dimension from last."""
    *alone, last = packed
    return [*alone, *(last.unbind(-3) if len(packed) < 3 else (last,))]


def _make_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _pack_empty(parts: Sequence[Tensor], count: int) -> list[Tensor]:
    """Empty gradients for as many tensors as hold the parts."""
    alone, together = parts[: count - 1], parts[count - 1 :]
    if len(together) == 1:
        return [torch.empty_like(x) for x in parts]
    *before, heads, head_dim = together[0].shape
    last = together[0].new_empty(*before, len(together), heads, head_dim)
    return [*(torch.empty_like(x) for x in alone), last]


def _attend_packed(
    packed: tuple[Tensor, ...],
    lengths: tuple[Any, ...] = (),
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,  # which changes no size
) -> Any:
    scale = softmax_scale or packed[0].shape[-1] ** -0.5
    options = (dropout_p, scale, causal, *window_size, softcap, alibi_slopes, deterministic)
    return FlashAttnFunc.apply(lengths, options, return_attn_probs, *packed)  # type: ignore[no-untyped-call]


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any) -> Any:
    return _attend_packed((q, k, v), (), *options, **named)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    return _attend_packed((q, kv), (), *options, **named)


def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Any:
    return _attend_packed((qkv,), (), *options, **named)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **named: Any,
) -> Any:
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    return _attend_packed((q, k, v), lengths, *options, **named)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **named: Any,
) -> Any:
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    return _attend_packed((q, kv), lengths, *options, **named)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: Any, **named: Any
) -> Any:
    lengths = (cu_seqlens, cu_seqlens, int(max_seqlen), int(max_seqlen))
    return _attend_packed((qkv,), lengths, *options, **named)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, *_caches: Any, return_softmax_lse: bool = False, **_named: Any
) -> Any:
    out, sums = fwd_kvcache(q, k_cache)
    return (out, sums) if return_softmax_lse else out


def _wrapped_flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, *options: Any, **named: Any
) -> tuple[Tensor, ...]:
    """As diffusers calls the package's operators, and imports them with the functions above."""
    is_returned = named.get("return_softmax", options[-1] if len(options) > 6 else False)
    return tuple(fwd(q, k, v, None, None, dropout_p, *[None] * 5, is_returned))


def _wrapped_flash_attn_backward(*arguments: Any, **named: Any) -> Tensor:
    is_deterministic = named.get("deterministic", arguments[16] if len(arguments) > 16 else False)
    return bwd(*arguments[:9], *[None] * 7, is_deterministic)[3]


# -- names that models import where the package is there, and that want it --


def apply_rotary_emb(*_arguments: Any, **_named: Any) -> Any:
    """transformers' Qwen2.5-VL before release 4.52."""
    _refuse("flash_attn.layers.rotary.apply_rotary_emb")


def apply_rotary(*_arguments: Any, **_named: Any) -> Any:
    """transformers' ModernBERT before release 5, like the class below."""
    _refuse("flash_attn.ops.triton.rotary.apply_rotary")


class RotaryEmbedding(nn.Module):
    def __init__(self, *_arguments: Any, **_named: Any) -> None:
        _refuse("flash_attn.layers.rotary.RotaryEmbedding")


def _refuse(path: str) -> NoReturn:
    stand_in = find_stand_in("flash_attn")
    assert stand_in is not None
    raise MissingNameError(path, stand_in)


# -- flash_attn.bert_padding --


class _IndexFirstAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = x.shape[0]
        flat = x.reshape(x.shape[0], -1)
        return flat.gather(0, _repeat(indices, flat)).reshape(-1, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        flat = gradient.reshape(gradient.shape[0], -1)
        zeros = flat.new_zeros(ctx.rows, flat.shape[1])
        zeros.scatter_(0, _repeat(indices, flat), flat)
        return zeros.reshape(ctx.rows, *gradient.shape[1:]), None


def _repeat(indices: Tensor, flat: Tensor) -> Tensor:
    return indices[:, None].expand(-1, flat.shape[1])


class _IndexPutFirstAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(indices)
        output = values.new_zeros(rows, *values.shape[1:])
        output[indices] = values
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        return gradient[indices], None, None


def index_first_axis(x: Tensor, indices: Tensor) -> Any:
    return _IndexFirstAxis.apply(x, indices)  # type: ignore[no-untyped-call]


def index_put_first_axis(values: Tensor, indices: Tensor, rows: int) -> Any:
    return _IndexPutFirstAxis.apply(values, indices, rows)  # type: ignore[no-untyped-call]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> Any:
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    longest = lengths.max().item()
    starts = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    rows = hidden_states.reshape(-1, *hidden_states.shape[2:])
    return index_first_axis(rows, indices), indices, starts, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Any:
    output = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return output.reshape(batch, seqlen, *output.shape[1:])


_FUNCTIONS = (
    *(flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func),
    *(flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func),
    flash_attn_with_kvcache,
)
_INTERFACE = {f.__name__: f for f in _FUNCTIONS}
_PADDING = (index_first_axis, index_put_first_axis, pad_input, unpad_input)
register_stand_in("flash_attn", _INTERFACE, version=_VERSION)
register_stand_in(
    "flash_attn.flash_attn_interface",
    {
        **_INTERFACE,
        **{f.__name__: f for f in (_wrapped_flash_attn_forward, _wrapped_flash_attn_backward)},
        "flash_attn_gpu": SimpleNamespace(**_COMPILED),  # which xformers takes
    },
    version=_VERSION,
)
_ROTARY = {"apply_rotary_emb": apply_rotary_emb, "RotaryEmbedding": RotaryEmbedding}
register_stand_in("flash_attn.layers.rotary", _ROTARY, version=_VERSION)
register_stand_in("flash_attn.ops.triton.rotary", {"apply_rotary": apply_rotary}, version=_VERSION)
register_stand_in("flash_attn.bert_padding", {f.__name__: f for f in _PADDING}, version=_VERSION)
