"""Choice of a backend for scaled dot product attention on CUDA.

Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and ``sdp_utils_cpp.h`` of
PyTorch 2.13: ``select_sdp_backend`` takes the first backend, in order of priority, that is enabled
and whose checks pass. The names of those checks are given below.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from fxmem.kernels.cuda.gpu import Gpu
from fxmem.versions.release import is_release

_HALVES = (torch.float16, torch.bfloat16)
_CUDNN_FIRST = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
_DEFAULT_ORDER = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""By the names that ``attention=`` takes."""
_MAX_CUDNN_SIZE = 65535
_CUDNN_DROPOUT_STEPS = 16
_DIMENSIONS = "inputs of 4 dimensions: batch, heads, tokens, head dimension"
_HEADS = "as many heads of key and value as of query"
_ROWS = "a last dimension that is contiguous in memory"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of ``scaled_dot_product_attention``; of tensors only the metadata is read."""

    query: Tensor  # batch, heads, queries, head dimension
    key: Tensor  # batch, heads, keys, head dimension
    value: Tensor  # batch, heads, keys, head dimension of the values
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def requires_grad(self) -> bool:
        """``input_requires_grad``, ``should_compute_logsumexp``."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.inputs)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the user in ``torch.backends.cuda`` and ``torch.nn.attention``."""

    enabled: frozenset[SDPBackend] = frozenset(_DEFAULT_ORDER)  # the backends that may be taken
    order: tuple[SDPBackend, ...] = _DEFAULT_ORDER  # all backends, the preferred ones first
    is_deterministic: bool = False  # ``torch.use_deterministic_algorithms`` without ``warn_only``


def read_settings(gpu: Gpu) -> Settings:
    """The settings of this process, the order as the GPU's first attention makes it.

    ``priority_order``: an order that the user has set (``sdpa_kernel(..., set_priority=True)``)
    stays.
    """
    cuda: Any = torch.backends.cuda
    flags = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
    }
    values = torch._C._get_sdp_priority_order()
    order = tuple(backend for value in values for backend in flags if backend.value == value)
    if order == _DEFAULT_ORDER and gpu.attention is not None:
        first = BACKENDS[gpu.attention]
        order = (first, *(backend for backend in order if backend is not first))
    elif order == _DEFAULT_ORDER and _prefers_cudnn(gpu):
        order = _CUDNN_FIRST
    return Settings(
        frozenset(backend for backend, enabled in flags.items() if enabled),
        order,
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _prefers_cudnn(gpu: Gpu) -> bool:
    """``check_prefer_cudnn_attention``: on Hopper and Blackwell; no such function before 2.9.

    In 2.9 with the cuDNN that PyTorch was built with, from 2.10 on only after 9.15.0 (pull request
    169849).
    """
    if is_release(before=(2, 9)) or gpu.capability[0] not in (9, 10):
        return False
    if is_release(before=(2, 10)):
        return os.environ.get("TORCH_CUDNN_SDPA_PREFERRED") != "0" and gpu.capability[1] == 0
    return os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1" and gpu.cudnn_version > 91500


def note_preference(operators: Iterable[str], gpu: Gpu) -> Iterator[str]:
    """Notes that attention runs by cuDNN because of the GPU, of the operators by these names."""
    is_asked = gpu.attention is not None
    if not is_asked and _prefers_cudnn(gpu) and any("cudnn_attention" in n for n in operators):
        yield (
            "Attention runs by cuDNN, which PyTorch prefers on this GPU: older releases take flash "
            "attention (--attention flash, attention='flash')."
        )


def choose_backend(call: AttentionCall, gpu: Gpu, settings: Settings) -> SDPBackend | None:
    """Returns the backend that CUDA takes; None if none may, which is an error there."""
    for backend in settings.order:
        if backend in settings.enabled and not _find_obstacle(backend, call, gpu, settings):
            return backend
    return None


def explain_math(call: AttentionCall, gpu: Gpu, settings: Settings) -> str:
    """Explains why neither flash nor memory-efficient attention serves a call."""
    fused = {
        "flash attention": SDPBackend.FLASH_ATTENTION,
        "memory-efficient attention": SDPBackend.EFFICIENT_ATTENTION,
    }
    by_need: dict[str, list[str]] = {}
    for name, backend in fused.items():
        is_enabled = backend in settings.enabled
        need = _find_obstacle(backend, call, gpu, settings) if is_enabled else "to be enabled"
        by_need.setdefault(need, []).append(name)
    return "; ".join(
        f"{' and '.join(names)} need{'s' if len(names) == 1 else ''} {need}"
        for need, names in by_need.items()
    )


def _find_obstacle(backend: SDPBackend, call: AttentionCall, gpu: Gpu, settings: Settings) -> str:
    """Finds the first need of a backend that a call does not meet; empty where it meets all."""
    return next(_OBSTACLES[backend](call, gpu, settings), "")


def _list_flash_obstacles(call: AttentionCall, gpu: Gpu, settings: Settings) -> Iterator[str]:
    """``can_use_flash_attention``."""
    head_dim = call.query.shape[-1]
    # ``check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120``
    is_small = (8, 6) <= gpu.capability <= (8, 9) or (12, 0) <= gpu.capability <= (12, 1)
    if (
        is_small
        and call.requires_grad
        and head_dim > 192
        and (head_dim <= 224 or call.dropout_p > 0)
    ):
        yield f"a head dimension up to 192 on this GPU, not {head_dim}"
    if not _is_4d(call):
        yield _DIMENSIONS
    if call.attn_mask is not None:
        yield "a call without attn_mask"
    if head_dim > 256 or not head_dim == call.key.shape[-1] == call.value.shape[-1]:
        yield "one head dimension of query, key and value, up to 256"
    if not (8, 0) <= gpu.capability <= (12, 1):
        yield "a GPU from Ampere on"
    if call.is_causal and call.query.shape[-2] != call.key.shape[-2]:
        yield "as many queries as keys where is_causal"
    if not _have_type(call, _HALVES):
        yield f"float16 or bfloat16, not {_name_type(call)}"
    if not _heads_match(call, call.enable_gqa, same_heads=True):
        yield _HEADS
    if not _have_rows(call) or not _are_rows_dense(call, ignore_single=True):
        yield _ROWS


def _list_efficient_obstacles(call: AttentionCall, gpu: Gpu, settings: Settings) -> Iterator[str]:
    """``can_use_mem_efficient_attention``."""
    types = (torch.float32, *_HALVES) if gpu.capability[0] >= 8 else (torch.float32, torch.float16)
    if not _is_4d(call):
        yield _DIMENSIONS
    if not (5, 0) <= gpu.capability <= (12, 1):
        yield "another GPU"
    if not _have_type(call, types):
        yield f"float16{', bfloat16' * (len(types) > 2)} or float32, not {_name_type(call)}"
    if not _is_aligned(call, gpu):
        multiple = 8 if call.query.dtype in _HALVES else 4
        odd = [x.shape[-1] for x in call.inputs if x.shape[-1] % multiple]
        if odd:
            yield f"a head dimension that is a multiple of {multiple}, not {odd[0]}"
        yield "query, key and value that begin at multiples of 16 bytes in memory"
    if not _have_rows(call) or not _are_rows_dense(call, ignore_single=False):
        yield _ROWS
    if not _heads_match(call, enable_gqa=False, same_heads=True):
        yield _HEADS


def _is_aligned(call: AttentionCall, gpu: Gpu) -> bool:
    """``check_head_dim_size_mem_efficient``, ``check_data_ptr_alignment_mem_efficient``."""
    # ``minimum_gemm_alignment``: in elements; tensor cores load 16 bytes.
    is_half, major = call.query.dtype in _HALVES, gpu.capability[0]
    has_tensor_cores = major >= 8 or (major == 7 and is_half)
    alignment = (8 if is_half else 4) if has_tensor_cores else 1
    head_dim, value_dim = call.query.shape[-1], call.value.shape[-1]
    if head_dim != call.key.shape[-1] or head_dim % alignment or value_dim % alignment:
        return False
    # Storages begin at multiples of 512 bytes, so the offset decides where a tensor begins.
    offsets = [x.storage_offset() for x in call.inputs] if major >= 8 else []
    return min(head_dim, value_dim) > 0 and not any(offset % alignment for offset in offsets)


def _list_cudnn_obstacles(call: AttentionCall, gpu: Gpu, settings: Settings) -> Iterator[str]:
    """``can_use_cudnn_attention``, ``check_cudnn_tensor_shapes``.

    From 2.12 on also ``check_cudnn_dropout`` (pull request 174245); an H200 with 2.11 took cuDNN
    for GPT-2's dropout of 0.1 (tests/data/cuda).
    """
    steps = call.dropout_p * _CUDNN_DROPOUT_STEPS
    if not _is_4d(call) or not _is_cudnn_mask(call):
        yield "other shapes"
    head_dim, value_dim = call.query.shape[3], call.value.shape[3]
    most = 128
    if gpu.capability == (9, 0) and gpu.cudnn_version >= 91000:
        most = 256
    elif gpu.capability[0] == 10 and gpu.cudnn_version >= 91100:
        most = 192 if (head_dim, value_dim) == (192, 128) else 128
    if not (
        not (call.dropout_p > 0 and 91100 < gpu.cudnn_version < 91400)
        and (steps == int(steps) or is_release(before=(2, 12)))
        and not settings.is_deterministic
        and _have_type(call, _HALVES)
        and (8, 0) <= gpu.capability <= (12, 1)
        and _have_rows(call)
        and _are_rows_dense(call, ignore_single=True)
        and _heads_match(call, call.enable_gqa, same_heads=False)
        and max(call.query.shape[:2]) <= _MAX_CUDNN_SIZE
        and max(head_dim, value_dim) <= most
        and not (head_dim % 8 or value_dim % 8)
        and call.key.shape[2] != 1
        and not (call.dropout_p != 0 and call.query.shape[2] == 1)
    ):
        yield "other sizes, types or settings"


def _is_cudnn_mask(call: AttentionCall) -> bool:
    """``check_attn_mask_shape``."""
    mask, query = call.attn_mask, call.query
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    sizes = (query.shape[0], query.shape[1], query.shape[2], call.key.shape[2])[-mask.dim() :]
    return all(size in (1, full) for size, full in zip(mask.shape, sizes, strict=True))


def _is_4d(call: AttentionCall) -> bool:
    """``check_tensor_shapes``."""
    return all(x.dim() == 4 for x in call.inputs)


def _have_type(call: AttentionCall, dtypes: tuple[torch.dtype, ...]) -> bool:
    """``check_tensor_dtype``."""
    dtype = call.query.dtype
    return dtype in dtypes and call.key.dtype == dtype == call.value.dtype


def _name_type(call: AttentionCall) -> str:
    names = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in call.inputs)
    return " and ".join(names)


def _have_rows(call: AttentionCall) -> bool:
    """``check_nonzero_sequence_lengths_dense``."""
    return call.query.shape[-2] != 0 and call.key.shape[-2] != 0


def _are_rows_dense(call: AttentionCall, *, ignore_single: bool) -> bool:
    """``check_last_dim_stride_equals_1_dense``."""
    if call.attn_mask is not None and call.attn_mask.stride(-1) != 1:
        return False
    if ignore_single and call.query.shape[-1] == 1:
        return True
    return all(x.stride(-1) == 1 for x in call.inputs)


def _heads_match(call: AttentionCall, enable_gqa: bool, *, same_heads: bool) -> bool:
    """``check_batch_size_and_num_heads_dense``, ``check_grouped_query_attention``."""
    if not call.query.shape[0] == call.key.shape[0] == call.value.shape[0]:
        return False
    heads, key_heads, value_heads = (x.shape[1] for x in call.inputs)
    if not enable_gqa:
        return heads == key_heads == value_heads
    if same_heads and key_heads != value_heads:
        return False
    return heads % key_heads == 0 and heads % value_heads == 0


_OBSTACLES: dict[SDPBackend, Callable[[AttentionCall, Gpu, Settings], Iterator[str]]] = {
    SDPBackend.FLASH_ATTENTION: _list_flash_obstacles,
    SDPBackend.EFFICIENT_ATTENTION: _list_efficient_obstacles,
    SDPBackend.CUDNN_ATTENTION: _list_cudnn_obstacles,
    SDPBackend.MATH: lambda call, gpu, settings: iter(()),
}
