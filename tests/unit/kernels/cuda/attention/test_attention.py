"""Attention on CUDA: what each backend makes, against attention.cpp and autograd."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from cuda_steps import Call, Watch, made, run_step, saved
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxmem
from fxmem.graph import MemoryGraph, Phase
from fxmem.kernels.cuda.attention import dispatch as attention
from fxmem.kernels.cuda.attention.backends import AttentionCall
from fxmem.kernels.cuda.gpu import Gpu
from fxmem.training import options

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16
H100 = Gpu((9, 0))
B, H, S, D = 2, 4, 256, 64
ELEMENTS = B * H * S * D
ROWS = B * H * S
Made = list[tuple[str, int]]


@contextlib.contextmanager
def analyse_for(gpu: Gpu) -> Iterator[None]:
    """Takes a GPU for the target where none is named."""
    with mock.patch.object(options, "describe_gpu", lambda _: gpu):
        yield


def leaf(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(sizes or (B, H, S, D), dtype=dtype, requires_grad=True)


def leaves(dtype: torch.dtype = BF16, *sizes: int) -> list[Tensor]:
    return [leaf(*sizes, dtype=dtype) for _ in range(3)]


def run(
    *inputs: Tensor, gpu: Gpu | None = None, mode: str = "train", **settings: Any
) -> MemoryGraph:
    """A step of attention; a fourth input is the mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, mask, **settings)

    with analyse_for(gpu or Gpu()):
        return run_step(attend, *inputs, mode=mode)


FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"
# The result, sums, states of 16 and 8 bytes. Backward: three gradients; sums and 64 floats a row;
# gradient and result in the order of rows.
FLASH_MADE = ELEMENTS * 2 + ROWS * 4 + 24
FLASH_INSIDE = ROWS * 65 * 4 + 2 * ELEMENTS * 2
# The result and sums of efficient attention and cuDNN.
HALVES = ELEMENTS * 2 + ROWS * 4
PAD, ZERO = ("constant_pad_nd", ELEMENTS * 2), ("scalar_tensor", 2)
KEYS = leaf(B, 1, S, D), leaf(B, 1, S, D)
MASK = torch.zeros(B, H, S, 248, dtype=BF16, requires_grad=True)
PADDED = (ELEMENTS + 2 * B * H * 248 * D + B * H * S * 256) * 2


BOOLEAN = torch.ones(S, S, dtype=torch.bool)
FUSED: list[tuple[list[Tensor], dict[str, Any], Made, int | None]] = [
    (leaves(), {"dropout_p": 0.1}, [(FLASH, FLASH_MADE)], 3 * ELEMENTS * 2 + FLASH_INSIDE),
    # In inference, too. 8 heads * 4 pieces of 216 processors, one block of 256 keys: not split.
    (leaves(), {"mode": "infer"}, [(FLASH, FLASH_MADE)], None),
    # Head dimensions are padded.
    (leaves(BF16, B, H, S, 60), {}, [*[PAD] * 3, (FLASH, FLASH_MADE)], None),
    # The gradients of shared keys and values are a quarter; inside those of every head.
    (
        [leaf(), *KEYS],
        {"enable_gqa": True},
        [(FLASH, FLASH_MADE)],
        (ELEMENTS + 2 * ELEMENTS // H) * 2 + FLASH_INSIDE + 2 * ELEMENTS * 2,
    ),
    # Seed and offset lie on the host. Gradients; the copied gradient; its products with the
    # result and their sums, twice (test_attention_buffers.py: more than the workspace).
    (leaves(F32), {}, [(EFFICIENT, ELEMENTS * 4 + ROWS * 4)], 5 * ELEMENTS * 4 + 2 * ROWS * 4),
    (leaves(F32), {"mode": "infer"}, [(EFFICIENT, ELEMENTS * 4)], None),
    # Sums of 100 rows are padded to 128.
    (leaves(F32, B, H, 100, D), {}, [(EFFICIENT, B * H * (100 * D + 128) * 4)], None),
    # where(mask, 0, -inf), of the queries' type; the mask and two scalars beside it.
    ([*leaves(), BOOLEAN], {}, [*[ZERO] * 2, ("where", S * S * 2), (EFFICIENT, HALVES)], None),
    # A mask's gradient is padded to 16. A100, 64: one block of 16 + 64 * 64 * 4 bytes for 64
    # of the 256 queries; a copied gradient.
    (
        [leaf(), leaf(B, H, 248, D), leaf(B, H, 248, D), MASK],
        {},
        [(EFFICIENT, HALVES)],
        PADDED + HALVES + B * H * 4 * (16 + 64 * 64 * 4),
    ),
    # cuDNN: gradients; that of a sum is expanded, and so copied; sums and 64 floats a row.
    (
        leaves(),
        {"gpu": H100, "dropout_p": 0.125},
        [(CUDNN, HALVES + 16)],
        3 * ELEMENTS * 2 + ELEMENTS * 2 + ROWS * 65 * 4,
    ),
    (leaves(), {"gpu": H100, "mode": "infer"}, [(CUDNN, ELEMENTS * 2 + 16)], None),
]


@pytest.mark.parametrize(("inputs", "settings", "forward", "gradients"), FUSED)
def test_fused_backends(
    inputs: list[Tensor], settings: dict[str, Any], forward: Made, gradients: int | None
) -> None:
    graph = run(*inputs, **settings)
    assert made(graph) == forward
    found = made(graph, Phase.BACKWARD)
    assert gradients is None or (f"{forward[-1][0]}_backward", gradients) in found


@pytest.mark.parametrize(
    ("mask", "padded"),
    [
        (torch.zeros(S, 250, dtype=BF16), S * 256 * 2),  # rows of 250 do not begin at multiples
        (torch.zeros(B, 1, 1, 250, dtype=BF16), B * 256 * 2),
        (torch.zeros(S, 248, dtype=BF16), 0),
        # Rows of 248 in 250 are odd as well, and get 8 more columns.
        (torch.zeros(S, 250, dtype=BF16)[:, :248], S * 256 * 2),
    ],
)
def test_rows_of_masks_are_padded(mask: Tensor, padded: int) -> None:
    keys = mask.shape[-1]
    graph = run(leaf(), leaf(B, H, keys, D), leaf(B, H, keys, D), mask)
    pads = [nbytes for name, nbytes in made(graph) if name == "constant_pad_nd"]
    assert pads == ([padded] if padded else [])


def test_what_is_refused() -> None:
    with pytest.raises(Exception, match="invalid dtype for bias"):
        run(*leaves(), torch.zeros(S, S, dtype=F32))


def test_math() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        graph = run(*leaves(), dropout_p=0.1, is_causal=True)
    scores = B * H * S * S
    # Halves are computed with in float. The product of matmul is added to in place; dropout is
    # one kernel with a mask of bytes; the weights are converted before the result is made.
    assert made(graph) == [
        *[("_to_copy", ELEMENTS * 4)] * 3,
        ("mul", ELEMENTS * 4),
        ("ones", S * S),
        ("tril", S * S),
        ("scalar_tensor", 4),
        ("scalar_tensor", 4),
        ("where", S * S * 4),
        ("mul", ELEMENTS * 4),
        ("bmm", scores * 4),
        # The softmax, where the scores are minus infinity, in which rows all are; a zero.
        ("_safe_softmax", scores * 4 + scores + ROWS + 4),
        ("native_dropout", scores * 4 + scores),
        ("_to_copy", scores * 2),
        ("bmm", ELEMENTS * 4),
        ("_to_copy", ELEMENTS * 2),
    ]
    shared = [leaf(B, 1, S, D, dtype=F32) for _ in range(2)]
    graph = run(leaf(dtype=F32), *shared, enable_gqa=True)
    assert [what for what in made(graph) if what[0] == "clone"] == [("clone", ELEMENTS * 4)] * 2


def describe_operator(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, object]:
    """Names an operator, as if not in place (native code is not while watched), and its shape."""
    return func._overloadpacket.__name__.removesuffix("_"), tuple(result.shape)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "settings",
    [
        {"scale": -0.3},
        {"enable_gqa": True, "is_causal": True},
        {"attn_mask": torch.rand(6, 10) > 0.2},
        {"attn_mask": torch.rand(6, 10), "enable_gqa": True},
    ],
)
def test_math_is_that_of_the_native_composite(settings: dict[str, Any], dtype: torch.dtype) -> None:
    mask = settings.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        settings = {**settings, "attn_mask": (mask := mask.to(dtype))}
    heads = 2 if settings.get("enable_gqa") else 4
    q = torch.randn(2, 4, 6, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, heads, 10, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    with sdpa_kernel(SDPBackend.MATH), Watch(describe_operator) as native:
        expected = functional.scaled_dot_product_attention(q, k, v, **settings)
    with Watch(describe_operator) as own:
        additive = attention._make_additive(mask, dtype)
        result = attention._run_math(AttentionCall(q, k, v, **settings), additive)
    assert own.calls == native.calls
    assert torch.equal(result, expected)


@pytest.mark.parametrize(("gpu", "expected"), [(Gpu(), 1), (H100, 3), (Gpu((7, 5)), 0)])
def test_the_choice_as_users_ask_for_it(gpu: Gpu, expected: int) -> None:
    def ask(x: Tensor) -> Tensor:
        assert torch._fused_sdp_choice(x, x, x) == expected
        return x * 2

    with analyse_for(gpu):
        run_step(ask, leaf())


def test_what_is_on_the_host_stays_there() -> None:
    host = [torch.ones(1, 1, 4, 8)] * 3
    graph = run_step(lambda x: x + functional.scaled_dot_product_attention(*host).sum(), leaf())
    assert not any("attention" in name for name, _ in made(graph))


def test_autocast_casts_before_the_choice() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=BF16):
            return functional.scaled_dot_product_attention(q, k, v)

    graph = run_step(attend, *leaves(F32))
    # The cast inputs are saved instead of the float ones.
    assert saved(graph)[:3] == [((B, H, S, D), "bfloat16")] * 3
    assert [name for name, _ in made(graph)] == ["_to_copy"] * 3 + [FLASH]


def test_the_scale_is_that_before_padding() -> None:
    flash = aten._scaled_dot_product_flash_attention.default

    def find_scale(func: Any, args: Any, kwargs: Any, result: Any) -> object:
        return kwargs["scale"] if func is flash else None

    def attend(x: Tensor) -> Tensor:
        with Watch(find_scale) as watch:
            y = functional.scaled_dot_product_attention(x, x, x)
        assert watch.calls == [pytest.approx(1 / math.sqrt(60))]
        return y

    run_step(attend, leaf(B, H, S, 60))


def test_the_backend_that_is_asked_for_runs_and_is_named() -> None:
    attend = Call(lambda x: functional.scaled_dot_product_attention(x, x, x))
    analysis = fxmem.analyze(attend, (leaf(),), gpu="h100", attention="efficient")
    ran = {operation.name.split(".")[1] for operation in analysis.graph.operations}
    assert "_scaled_dot_product_efficient_attention" in ran
    assert analysis.setup.attention == "efficient"
    assert "; attention efficient; " in str(analysis)
