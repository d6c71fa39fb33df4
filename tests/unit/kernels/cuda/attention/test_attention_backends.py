"""The backend of attention on CUDA: a table from the checks in sdp_utils.cpp."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fxmem.kernels.cuda.attention.backends import (
    BACKENDS,
    AttentionCall,
    choose_backend,
    explain_math,
    note_preference,
    read_settings,
)
from fxmem.kernels.cuda.gpu import Gpu

FLASH = SDPBackend.FLASH_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
CUDNN = SDPBackend.CUDNN_ATTENTION
MATH = SDPBackend.MATH

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
T4, A100, RTX3090, L4 = (Gpu((7, 5)), Gpu((8, 0)), Gpu((8, 6)), Gpu((8, 9)))
H100, B200, RTX5090 = Gpu((9, 0)), Gpu((10, 0)), Gpu((12, 0))
SHAPE = (2, 8, 128, 64)


def empty(
    *sizes: int, dtype: torch.dtype = BF16, strides: tuple[int, ...] | None = None, offset: int = 0
) -> Tensor:
    if strides is None:
        return torch.empty(sizes, dtype=dtype, device="meta")
    return torch.empty(10**6, dtype=dtype, device="meta").as_strided(sizes, strides, offset)


def call(
    query: tuple[int, ...] = SHAPE,
    key: tuple[int, ...] | None = None,
    value: tuple[int, ...] | None = None,
    *,
    dtype: torch.dtype = BF16,
    grad: bool = True,
    **kwargs: Any,
) -> AttentionCall:
    key = key or query
    q, k, v = (empty(*x, dtype=dtype).requires_grad_(grad) for x in (query, key, value or key))
    return AttentionCall(q, k, v, **kwargs)


def call_same(*sizes: int, **kwargs: Any) -> AttentionCall:
    x = empty(*sizes, **kwargs)
    return AttentionCall(x, x, x)


def choose(what: AttentionCall, gpu: Gpu = A100) -> SDPBackend | None:
    return choose_backend(what, gpu, read_settings(gpu))


def mask(*sizes: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return empty(*sizes, dtype=dtype)


TYPES = [
    # check_dtypes_flash_attention: halves; mem efficient float too; float64 neither.
    (call(dtype=F16), A100, FLASH),
    (call(dtype=F32), A100, EFFICIENT),
    (call(dtype=F64), A100, MATH),
    # Turing: no flash (sm80 on); mem efficient takes float16 and float32, not bfloat16.
    (call(dtype=F16), T4, EFFICIENT),
    (call(dtype=BF16), T4, MATH),
    # check_prefer_cudnn_attention: majors 9 and 10.
    (call(dtype=BF16), H100, CUDNN),
    (call(dtype=F16), B200, CUDNN),
    (call(dtype=BF16), RTX5090, FLASH),
    (call(dtype=BF16), Gpu((9, 0), cudnn_version=91500), FLASH),
    (call(dtype=BF16), Gpu((9, 0), cudnn_version=91501), CUDNN),
    # A multiple of 1/16, from 2.12 on (pull request 174245).
    (call(dtype=BF16, dropout_p=0.125), Gpu((9, 0), cudnn_version=91501), CUDNN),
    (call(dtype=BF16, dropout_p=0.1), Gpu((9, 0), cudnn_version=91501), FLASH),
    (call(dtype=BF16), Gpu((13, 0)), MATH),
]

HEAD_DIMS = [
    # Flash pads to a multiple of 8 itself.
    (call((2, 8, 128, 60)), A100, FLASH),
    (call((2, 8, 128, 257)), A100, MATH),
    (call((2, 8, 128, 264)), A100, EFFICIENT),
    (call((2, 8, 128, 64), None, (2, 8, 128, 32)), A100, EFFICIENT),
    (call((2, 8, 128, 64), None, (2, 8, 128, 36)), A100, MATH),
    # minimum_gemm_alignment: 4 floats from Ampere on, any number before.
    (call((2, 8, 128, 36), dtype=F32), A100, EFFICIENT),
    (call((2, 8, 128, 34), dtype=F32), A100, MATH),
    (call((2, 8, 128, 33), dtype=F32), T4, EFFICIENT),
    (call((2, 8, 128, 36), dtype=F16), T4, MATH),
    # Training with more than 192 on small chips: only over 224 and without dropout.
    (call((2, 8, 128, 200)), RTX3090, EFFICIENT),
    (call((2, 8, 128, 200), grad=False), RTX3090, FLASH),
    (call((2, 8, 128, 256)), L4, FLASH),
    (call((2, 8, 128, 256), dropout_p=0.1), L4, EFFICIENT),
    (call((2, 8, 128, 224)), RTX5090, EFFICIENT),
    # cuDNN: a multiple of 8 to 128; to 256 on sm90; 192 with 128 on sm100.
    (call((2, 8, 128, 60)), H100, FLASH),
    (call((2, 8, 128, 136)), B200, FLASH),
    (call((2, 8, 128, 192), None, (2, 8, 128, 128)), B200, CUDNN),
    (call((2, 8, 128, 192), None, (2, 8, 128, 64)), B200, EFFICIENT),
    (call((2, 8, 128, 64), None, (2, 8, 128, 32)), H100, CUDNN),
]

SHAPES = [
    (call((8, 128, 64)), A100, MATH),
    (call((2, 8, 128, 64), (1, 8, 128, 64)), A100, MATH),
    # Causal with unequal lengths: not flash, whose mask is aligned to the other corner.
    (call((2, 8, 64, 64), is_causal=True), A100, FLASH),
    (call((2, 8, 64, 64), (2, 8, 128, 64), is_causal=True), A100, EFFICIENT),
    (call((2, 8, 64, 64), (2, 8, 128, 64), is_causal=True), H100, CUDNN),
    # check_cudnn_tensor_shapes: one key; one query with dropout; a large batch.
    (call((2, 8, 128, 64), (2, 8, 1, 64)), H100, FLASH),
    (call((2, 8, 1, 64), (2, 8, 128, 64), dropout_p=0.5), H100, FLASH),
    (call((65536, 1, 16, 64)), H100, FLASH),
    (call((65535, 1, 16, 64)), H100, CUDNN),
    # Grouped queries: flash and cuDNN know them, mem efficient does not.
    (call((2, 8, 128, 64), (2, 2, 128, 64), enable_gqa=True), A100, FLASH),
    (call((2, 8, 128, 64), (2, 2, 128, 64)), A100, MATH),
    (call((2, 8, 128, 64), (2, 3, 128, 64), enable_gqa=True), A100, MATH),
    (call((2, 8, 128, 64), (2, 2, 128, 64), enable_gqa=True, dtype=F32), A100, MATH),
    (call((2, 8, 128, 64), (2, 2, 128, 64), (2, 4, 128, 64), enable_gqa=True), A100, MATH),
    (call((2, 8, 128, 64), (2, 2, 128, 64), (2, 4, 128, 64), enable_gqa=True), H100, CUDNN),
    (call(SHAPE, (2, 2, 128, 64), enable_gqa=True, attn_mask=mask(128, 128)), A100, MATH),
]

MASKS = [
    (call(attn_mask=mask(2, 1, 1, 128, dtype=BF16)), A100, EFFICIENT),
    (call(attn_mask=mask(128, 128), is_causal=True), A100, EFFICIENT),
    (call(attn_mask=mask(128, 128)), H100, CUDNN),
    # check_attn_mask_shape: two or four dimensions, each whole or one; no gradient.
    (call(attn_mask=mask(2, 1, 1, 128)), H100, CUDNN),
    (call(attn_mask=mask(1, 128, 128)), H100, EFFICIENT),
    (call(attn_mask=mask(128, 128, dtype=BF16).requires_grad_()), H100, EFFICIENT),
    # The last dimension of a mask has to be dense too.
    (call(attn_mask=empty(128, 128, dtype=torch.bool, strides=(1, 128))), A100, MATH),
    (call(attn_mask=empty(128, 128, dtype=torch.bool, strides=(1, 0))), H100, MATH),
]

DROPOUT = [
    (call(dropout_p=0.1), A100, FLASH),
    # cuDNN's resolution is 1/16.
    (call(dropout_p=0.1), H100, FLASH),
    (call(dropout_p=0.125), H100, CUDNN),
    (call(dropout_p=0.5, attn_mask=mask(128, 128)), H100, CUDNN),
]

ROW = (65536, 8192, 64, 1)
LAYOUTS = [
    (call_same(2, 8, 128, 64, strides=(65536, 8192, 1, 128)), A100, MATH),
    # With a head dimension of one the stride is nothing to flash (which pads it).
    (call_same(2, 8, 128, 1, strides=(2048, 256, 2, 2)), A100, FLASH),
    # From an offset that is no multiple of 16 bytes mem efficient cannot load.
    (call_same(2, 8, 128, 64, dtype=F32, strides=ROW, offset=4), A100, EFFICIENT),
    (call_same(2, 8, 128, 64, dtype=F32, strides=ROW, offset=2), A100, MATH),
    (call_same(2, 8, 128, 64, dtype=F32, strides=ROW, offset=2), T4, EFFICIENT),
    (call_same(2, 8, 128, 64, strides=ROW, offset=2), A100, FLASH),
]


@pytest.mark.parametrize(
    ("what", "gpu", "backend"), TYPES + HEAD_DIMS + SHAPES + MASKS + DROPOUT + LAYOUTS
)
def test_the_backend_follows_the_checks(what: AttentionCall, gpu: Gpu, backend: SDPBackend) -> None:
    assert choose(what, gpu) is backend


def test_gradients_are_only_asked_for_where_they_are_enabled() -> None:
    with torch.no_grad():
        assert choose(call((2, 8, 128, 200)), RTX3090) is FLASH


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ([MATH], MATH),
        ([CUDNN], CUDNN),
        ([EFFICIENT, MATH], EFFICIENT),
        ([CUDNN, MATH], MATH),  # math comes before cuDNN on an A100
    ],
)
def test_the_context_of_torch_nn_attention(backends: Any, expected: SDPBackend) -> None:
    with sdpa_kernel(backends):
        assert choose(call()) is expected
    assert choose(call()) is FLASH


def test_an_order_that_the_user_sets() -> None:
    with sdpa_kernel([CUDNN, FLASH], set_priority=True):
        assert choose(call()) is CUDNN
    with sdpa_kernel([EFFICIENT, CUDNN], set_priority=True):
        assert choose(call(), H100) is EFFICIENT
    with sdpa_kernel([FLASH]):
        assert choose(call(dtype=F32)) is None


def test_a_backend_that_is_asked_for_comes_first_and_the_code_wins() -> None:
    for name, backend in BACKENDS.items():
        asked = replace(H100, attention=name)
        assert choose(call(), asked) is backend
        with sdpa_kernel([EFFICIENT]):
            assert choose(call(), asked) is EFFICIENT
        with sdpa_kernel([EFFICIENT, FLASH, CUDNN, MATH], set_priority=True):
            assert choose(call(), asked) is EFFICIENT
    assert choose(call(dtype=F32), replace(H100, attention="flash")) is EFFICIENT


def test_what_a_gpu_prefers_is_noted() -> None:
    names = ["aten._scaled_dot_product_cudnn_attention.default"]
    assert len([*note_preference(names, H100)]) == (choose(call(), H100) is CUDNN)
    for gpu in (A100, replace(H100, attention="cudnn")):
        assert not [*note_preference(names, gpu)]


HEADS = (2, 4, 64, 32)
NEEDS = [
    (call(HEADS, dtype=torch.float64), A100, "float16, bfloat16 or float32, not float64"),
    (call(HEADS), T4, "float16 or float32, not bfloat16"),
    (call((4, 64, 32), dtype=torch.float32), A100, "inputs of 4 dimensions"),
    (call(HEADS, (2, 2, 64, 32), enable_gqa=True, attn_mask=mask(64, 64)), A100, "as many heads"),
    (call((2, 4, 64, 300)), A100, "a head dimension that is a multiple of 8, not 300"),
    (
        call_same(*HEADS, dtype=F32, strides=(8192, 2048, 32, 1), offset=1),
        A100,
        "begin at multiples of 16 bytes",
    ),
    (call(HEADS, attn_mask=mask(64, 64).T), A100, "a last dimension that is contiguous in memory"),
]


@pytest.mark.parametrize(("what", "gpu", "need"), NEEDS, ids=[need for _, _, need in NEEDS])
def test_the_need_that_leaves_the_math_kernel(what: AttentionCall, gpu: Gpu, need: str) -> None:
    assert choose(what, gpu) is SDPBackend.MATH
    assert need in explain_math(what, gpu, read_settings(gpu))
