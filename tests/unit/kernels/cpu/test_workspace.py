"""The estimates equal what the CPU profiler sees inside the real kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import check, strided
from torch import Tensor

from fxmem.kernels.cpu.onednn import library as onednn

aten = torch.ops.aten

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(onednn.library() is None, reason="oneDNN cannot be asked for its layouts"),
]


F32, BF16 = torch.float32, torch.bfloat16
PLANES, LAST = torch.contiguous_format, torch.channels_last


def check_convolution(
    sizes: tuple[int, ...], channels: int, kernel: int, *,
    stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1,
    transposed: bool = False, bias: bool = True, lies: Any = PLANES, dtype: torch.dtype = F32,
) -> None:  # fmt: skip
    """Check a convolution forward and backward, with several output masks."""
    spatial = len(sizes) - 2
    inner, outer = (channels // groups, sizes[1]) if transposed else (sizes[1] // groups, channels)
    input_ = torch.randn(sizes).to(dtype, memory_format=lies)
    weight = torch.randn(outer, inner, *[kernel] * spatial).to(dtype)
    vector = torch.randn(channels).to(dtype) if bias else None
    geometry = ([stride] * spatial, [padding] * spatial, [dilation] * spatial)
    rest = (*geometry, transposed, [0] * spatial, groups)
    output = check(aten.convolution.default, input_, weight, vector, *rest)
    assert isinstance(output, Tensor)
    backward, operands = aten.convolution_backward.default, (torch.randn_like(output), input_)
    for mask in ([True, True, bias], [False, True, bias], [True, False, False]):
        check(backward, *operands, weight, [channels] if bias else None, *rest, mask)


@pytest.mark.parametrize(
    ("batch", "lies", "dtype"),
    [(1, PLANES, F32), (2, PLANES, F32), (2, LAST, F32), (2, PLANES, BF16)],
)
@pytest.mark.parametrize(
    ("inner", "side", "channels", "kernel", "options"),
    [
        (3, 32, 32, 7, {"stride": 2, "padding": 3, "bias": False}),
        (16, 14, 32, 3, {"padding": 1}),
        (16, 14, 24, 1, {}),
        (16, 14, 32, 1, {"stride": 2}),
        (16, 14, 16, 3, {"groups": 16}),
        (16, 14, 16, 3, {"groups": 4}),
        (16, 14, 16, 3, {"padding": 2, "dilation": 2}),
        (16, 14, 8, 2, {"stride": 2, "transposed": True}),
    ],
)
def test_convolution_2d(
    inner: int, side: int, channels: int, kernel: int, options: Any,
    batch: int, lies: Any, dtype: torch.dtype,
) -> None:  # fmt: skip
    sizes = (batch, inner, side, side)
    check_convolution(sizes, channels, kernel, **options, lies=lies, dtype=dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(2, 16, 20), (1, 16, 20), (2, 3, 6, 6, 6), (1, 3, 6, 6, 6)])
def test_convolution_1d_and_3d(sizes: tuple[int, ...], transposed: bool) -> None:
    check_convolution(sizes, 8, 3, transposed=transposed)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("channels", [2, 30, 64])
def test_upsampling_3d_to_fewer_values_keeps_the_storage(channels: int, groups: int) -> None:
    # The last block of MONAI's UNet: from many channels to two.
    check_convolution((1, 32, 6, 6, 6), channels, 3, padding=1, transposed=True, groups=groups)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"groups": 2}, {"dilation": 2}, {"transposed": True}, {"bias": False}]
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_convolution_without_mkldnn(options: Any, batch: int, dtype: torch.dtype) -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        for sizes in ((batch, 4, 10, 10), (batch, 4, 5, 6, 7)):
            for kernel in (1, 3):
                check_convolution(sizes, 8, kernel, dtype=dtype, **options)


@pytest.mark.usefixtures("threads")
def test_convolution_follows_the_number_of_threads() -> None:
    check_convolution((2, 16, 14, 14), 32, 1)
    check_convolution((2, 32, 14, 14), 32, 3, padding=1)


TYPES = [(F32, F32), (F32, None), (BF16, F32), (BF16, BF16)]
"""Types of the input and of the parameters."""


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("sizes", "lies"),
    [((2, 16, 6, 6), PLANES), ((2, 16, 6, 6), LAST), ((2, 16, 1, 1), PLANES), ((5, 16), PLANES)],
)
def test_batch_norm(sizes: Any, lies: Any, training: bool, dtype: torch.dtype) -> None:
    x = torch.randn(sizes).to(dtype, memory_format=lies)
    weight, bias, mean, variance = (torch.ones(16, dtype=dtype) for _ in range(4))
    parameters = (weight, bias, mean, variance, training, 0.1, 1e-5)
    _, *saved = check(aten.native_batch_norm.default, x, *parameters)  # type: ignore[misc]
    for mask in ([True, True, True], [True, False, False], [False, True, True]):
        operands = (torch.randn_like(x), x, weight, mean, variance, *saved, training, 1e-5, mask)
        check(aten.native_batch_norm_backward.default, *operands)


@pytest.mark.parametrize("dtypes", TYPES)
@pytest.mark.parametrize("make", [torch.randn, strided])
def test_layer_norm(make: Callable[..., Tensor], dtypes: Any) -> None:
    x, gradient = (make(3, 5, 16).to(dtypes[0]) for _ in "xg")
    weight = None if dtypes[1] is None else torch.ones(16, dtype=dtypes[1])
    out = check(aten.native_layer_norm.default, x, [16], weight, weight, 1e-5, layouts=True)
    for mask in ([True] * 3, [True, False, False]) if weight is not None else ():
        operands = (gradient, x, [16], *out[1:], weight, weight, mask)  # type: ignore[index]
        check(aten.native_layer_norm_backward.default, *operands, layouts=True)


@pytest.mark.parametrize("dtypes", TYPES)
@pytest.mark.parametrize("side", [4, 33, 46])
@pytest.mark.parametrize("lies", [PLANES, LAST])
def test_group_norm(lies: Any, side: int, dtypes: Any) -> None:
    x = torch.randn(2, 8, side, side).to(dtypes[0], memory_format=lies)
    weight = None if dtypes[1] is None else torch.ones(8, dtype=dtypes[1])
    numbers = (2, 8, side * side, 2)
    forward = aten.native_group_norm.default
    out = check(forward, x, weight, weight, *numbers, 1e-5, layouts=True)
    if dtypes == (F32, F32):
        operands = (torch.randn_like(x), x, *out[1:], weight)  # type: ignore[index]
        check(aten.native_group_norm_backward.default, *operands, *numbers, [True] * 3)


FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize(("queries", "keys"), [(16, 20), (200, 30), (800, 600)])
@pytest.mark.parametrize("masked", [False, True])
def test_flash_attention(queries: int, keys: int, masked: bool) -> None:
    operands = [torch.randn(1, 2, size, 8) for size in (queries, keys, keys)]
    mask = torch.zeros(1, 2, queries, keys) if masked else None
    out, sums = check(FLASH, *operands, 0.0, False, attn_mask=mask)  # type: ignore[misc]
    check(FLASH, *(x.bfloat16() for x in operands), 0.0, False)
    for gradient in (torch.randn_like(out), torch.randn(out.shape)):
        check(FLASH_BACKWARD, gradient, *operands, out, sums, 0.0, False, attn_mask=mask)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "head"),
    [(40, 40, 40), (256, 600, 32), (256, 601, 33), (800, 87, 33), (9, 9, 8), (200, 50, 64)],
)
def test_flash_attention_of_reduced_types(
    queries: int, keys: int, head: int, rows_first: bool, dtype: torch.dtype
) -> None:
    def make(rows: int) -> Tensor:
        if rows_first:
            return torch.randn(2, rows, 2, head).to(dtype).transpose(1, 2)
        return torch.randn(2, 2, rows, head).to(dtype)

    operands = make(queries), make(keys), make(keys)
    out, sums = check(FLASH, *operands)  # type: ignore[misc]
    for gradient in (make(queries), torch.ones(1, dtype=dtype).expand(out.shape)):
        check(FLASH_BACKWARD, gradient, *operands, out, sums, 0.0, False)


def test_safe_softmax() -> None:
    check(aten._safe_softmax.default, torch.randn(2, 4, 8, 8), -1)
    check(aten._safe_softmax.default, torch.randn(2, 8, 8).bfloat16(), -1, dtype=torch.float32)


def test_bfloat16_matrix_products() -> None:
    def half(*sizes: int) -> Tensor:
        return torch.randn(sizes).bfloat16()

    x, weight, right = half(64, 128), half(48, 128), half(4, 64, 48)
    check(aten.mm.default, x, weight.t())
    check(aten.mm.default, x.t(), half(64, 32))
    check(aten.mm.out, x, weight.t(), out=half(64, 48))  # Scion of pytorch_optimizer
    check(aten.addmm.out, half(64, 48), x, weight.t(), out=half(64, 48))
    check(aten.baddbmm.out, half(4, 64, 48), right, half(4, 48, 48), out=half(4, 64, 48))
    check(aten.addmm.default, half(48), x, weight.t())
    check(aten.bmm.default, half(4, 32, 16), half(4, 16, 32))
    check(aten.mm.default, x[:4, :8], weight.t()[:8])
    for left in (
        strided(4, 32, 64, dtype=BF16),
        torch.ones(1, dtype=BF16).expand(4, 32, 64),
        half(1, 32, 64).expand(4, 32, 64),
        half(32, 4, 64).transpose(0, 1),
        half(4, 32, 128)[..., :64],
    ):
        check(aten.bmm.default, left, right)
        check(aten.baddbmm.default, half(4, 32, 48), left, right)
        check(aten.mm.default, left[0], right[0])
        for vector in (right[0, :, 0], right[0, :, 0].clone()):
            check(aten.mv.default, left[0], vector)


def test_indexing() -> None:
    indices = torch.randint(0, 9, (4, 6))
    gradient = torch.randn(4, 6, 5)
    backward = aten.embedding_dense_backward.default
    for index in (indices, indices.t().contiguous().t()):
        check(aten.embedding.default, torch.randn(9, 5), index)
        check(backward, gradient, index, 9, -1, False)
        check(backward, strided(4, 6, 5), index, 9, -1, False)
    x = torch.randn(2, 6, 7, 3)
    check(aten.roll.default, x, [2], [1])
    check(aten.roll.default, x, [-3, -3, 1], [1, 2, 3])
    check(aten.sort.default, x, 1)
    check(aten.sort.stable, x, stable=True, dim=-1)
    check(aten.cumsum.default, torch.ones(3, 4, dtype=torch.int32), 1)
    check(aten.cumsum.default, x, 1)


def test_type_promotion() -> None:
    x, index = torch.randn(6, 10), torch.arange(4)
    for func, args in (
        (aten.mul.Tensor, (x, 2.0)),
        (aten.mul.Tensor, (x, torch.tensor(2.0))),
        (aten.mul.Tensor, (x, torch.tensor(2.0, dtype=torch.float64))),
        (aten.add.Tensor, (x, torch.ones(6, 10, dtype=torch.int64))),
        (aten.add.Tensor, (x.bfloat16(), x)),
        (aten.mul.Tensor, (x.bfloat16(), 2)),
        (aten.mul.Tensor, (x > 0, x)),
        (aten.add.Tensor, (index, 1)),
        (aten.mul.Tensor, (index, 2.0)),
        (aten.div.Tensor, (index, 2)),
        (aten.gt.Scalar, (index, 0)),
        (aten.ge.Scalar, (x, 0)),
        (aten.pow.Scalar, (2.0, x)),
        (aten.rsub.Scalar, (x, 1)),
        (aten.gelu_backward.default, (strided(6, 10), x)),
    ):
        check(func, *args)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sizes", [(9, 2, 32, 48), (7, 1, 64, 80), (6, 32, 64, 64)])
def test_lstm(sizes: tuple[int, int, int, int], reverse: bool, dtype: torch.dtype) -> None:
    if dtype is BF16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 kernels")
    steps, batch, features, hidden = sizes
    x = torch.randn(steps, batch, features).to(dtype)
    weights = [torch.randn(4 * hidden, size).to(dtype) for size in (features, hidden)]
    operands = (x, *weights, *[torch.randn(4 * hidden).to(dtype)] * 2)
    state, options = torch.randn(batch, hidden).to(dtype), (2, hidden, 1, True)
    for training in (False, True):
        rest = (state, state, reverse, [], *options, False, False, training)
        out = check(aten.mkldnn_rnn_layer.default, *operands, *rest, enable_grad=training)
    assert isinstance(out, tuple)
    dense = torch.randn_like(out[0])
    transposed = torch.randn_like(out[0].transpose(0, 1).contiguous()).transpose(0, 1)
    gradient = torch.randn_like(out[1])
    rest = (reverse, *options, True, False, [], False, out[3])
    for gradients in ((dense, None, None), (transposed, gradient, None), (None, None, gradient)):
        for cell in (state, state.clone()):
            backward = (*operands, state, cell, *out[:3], *gradients, *rest)
            check(aten.mkldnn_rnn_layer_backward.default, *backward, enable_grad=True)
