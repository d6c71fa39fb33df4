"""The fast paths of attention modules on CUDA: against PyTorch's results, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_steps import made, run_step
from saved_sets.networks import Attention
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fxmem.graph import MemoryGraph
from fxmem.kernels.cuda.attention import dispatch as attention
from fxmem.kernels.cuda.attention import transformer

aten = torch.ops.aten
BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 2, 10, 64, 4, 128
ROWS = BATCH * LENGTH
X = ROWS * WIDTH * 4
"""Bytes of an input of floats."""
SCORES = BATCH * HEADS * LENGTH * LENGTH * 4


def infer(model: nn.Module, *inputs: Tensor) -> MemoryGraph:
    return run_step(model, *(inputs or (torch.zeros(BATCH, LENGTH, WIDTH),)), mode="infer")


FUSED = [("addmm", 3 * X), ("_scaled_dot_product_efficient_attention", X), ("addmm", X)]
"""linear, its parts attended to, linear; no sums in inference."""
SCORED = [
    ("mm", 3 * X),
    ("_transform_bias_rescale_qkv", 3 * X),
    ("bmm", SCORES),  # softmax in place; the context takes the queries' place
    ("clone", X),
    ("addmm", X),
]
NORM = ("native_layer_norm", X + 2 * ROWS * 4)
FEED = [("_addmm_activation", ROWS * HIDDEN * 4), ("addmm", X)]


def layer(**settings: bool) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True, **settings)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Attention(need_weights=False), FUSED),
        (Attention(), [*SCORED, ("sum", SCORES // HEADS)]),
        (Attention(average_attn_weights=False), SCORED),
        # Residuals are added in place.
        (layer(), [*FUSED, NORM, *FEED, NORM]),
        (layer(norm_first=True), [NORM, *FUSED, NORM, *FEED]),
        (nn.TransformerEncoder(layer(), 2), [*FUSED, NORM, *FEED, NORM] * 2),
    ],
)
def test_what_inference_makes(model: nn.Module, expected: list[tuple[str, int]]) -> None:
    assert made(infer(model)) == expected


def test_no_fused_backend_is_enabled() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert made(infer(Attention(need_weights=False))) == SCORED


def after_scores(model: nn.Module, *inputs: Tensor) -> list[tuple[str, int]]:
    """Lists what comes between the scores and the context."""
    what = made(infer(model, *inputs))
    names = [name for name, _ in what]
    return what[names.index("bmm") + 1 : names.index("clone")]


@pytest.mark.parametrize(
    ("sizes", "name", "expected"),
    [
        # Made a float one by F._canonical_mask, and boolean again; masked_softmax_cuda has a
        # kernel for one mask for each sequence.
        ((BATCH, LENGTH), "key_padding_mask", [BATCH * LENGTH, SCORES]),
        # One for all is expanded for all heads by merge_masks, and dense once it is boolean.
        ((LENGTH, LENGTH), "attn_mask", [SCORES // 4, SCORES]),
        # Rows that are too long for that kernel.
        ((1, 1032), "key_padding_mask", [1032, 3 * HEADS * 1032 * 1032 * 4]),
    ],
)
def test_a_mask_is_for_the_softmax(sizes: Any, name: str, expected: list[int]) -> None:
    mask = {name: torch.zeros(sizes, dtype=torch.bool)}
    x = torch.zeros(1 if sizes[0] == 1 else BATCH, sizes[1], WIDTH)
    found = after_scores(Attention(name, need_weights=False, **mask), x)
    assert found == list(zip(("_to_copy", "_masked_softmax"), expected, strict=True))


def test_training_takes_the_layers_own_operators() -> None:
    names = [name for name, _ in made(run_step(layer(), torch.zeros(BATCH, LENGTH, WIDTH)))]
    assert "_addmm_activation" not in names
    assert names.count("native_dropout") == 3  # that of attention is inside its kernel
    assert "_scaled_dot_product_efficient_attention" in names


@pytest.fixture(params=[SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SDPBackend:
    """Real tensors of the CPU go by the composites; fused attention is that of the CPU."""
    monkeypatch.setattr(transformer, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(attention, "is_on_gpu", lambda x: False)
    monkeypatch.setattr(transformer, "choose", lambda call: request.param)
    return request.param


def weights() -> tuple[Tensor, ...]:
    sizes: list[tuple[int, ...]] = [(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
    return tuple(torch.randn(x) * 0.1 for x in sizes)


@pytest.mark.parametrize("needed", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("inputs", [(0, 0, 0), (0, 1, 1), (0, 1, 2)])
@pytest.mark.parametrize("mask_type", [None, 0, 1, 2])
def test_the_composite_computes_what_the_native_one_does(
    mask_type: int | None, inputs: Any, needed: tuple[bool, bool], backend: SDPBackend
) -> None:
    sizes = [(LENGTH, LENGTH), (BATCH, LENGTH), (BATCH, HEADS, LENGTH, LENGTH)]
    mask = None if mask_type is None else torch.rand(sizes[mask_type]) > 0.7
    if backend is not SDPBackend.MATH and (mask is not None or needed[0]):
        return  # is not asked to choose
    tensors = [torch.randn(BATCH, LENGTH, WIDTH) for _ in range(3)]
    args = (*(tensors[i] for i in inputs), WIDTH, HEADS, *weights(), mask, *needed, mask_type)
    expected = torch._native_multi_head_attention(*args)
    result = transformer.native_multi_head_attention(*args)
    torch.testing.assert_close(result[0], expected[0], equal_nan=True)
    if needed[0]:
        torch.testing.assert_close(result[1], expected[1], equal_nan=True)
    else:
        assert result[1] is None


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("use_gelu", [False, True])
def test_the_layer_computes_what_the_native_one_does(
    use_gelu: bool, norm_first: bool, backend: SDPBackend
) -> None:
    x, norms = torch.randn(BATCH, LENGTH, WIDTH), [torch.randn(WIDTH) for _ in range(4)]
    sizes = (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN)
    feed = [torch.randn(size) * 0.1 for size in sizes]
    flags = (use_gelu, norm_first, 1e-5)
    args = (x, WIDTH, HEADS, *weights(), *flags, *norms, *feed, torch.randn(WIDTH), None, None)
    expected = torch._transformer_encoder_layer_fwd(*args)
    result = transformer.transformer_encoder_layer(*args)
    torch.testing.assert_close(result, expected)
