"""Buffers of fused attention's kernels on CUDA, worked out by hand from their sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_steps import estimate, on_gpu, run_kernel
from torch import Tensor

from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.attention.efficient import choose_kernel
from fxmem.kernels.cuda.gpu import Gpu, use_gpu
from fxmem.kernels.registry import OperatorCall

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
T4, A100, L4, H100 = Gpu((7, 5)), Gpu((8, 0)), Gpu((8, 9)), Gpu((9, 0))
SXM = Gpu((9, 0), multiprocessors=132)
ANY = 65536


def make(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
    """Batch, heads, rows, head dimension; in memory the rows before the heads."""
    batch, heads, rows, head_dim = sizes
    return torch.empty(batch, rows, heads, head_dim, dtype=dtype).transpose(1, 2)


# -- Flash: flash_api.cpp --


@pytest.mark.parametrize(
    ("query", "key", "gpu", "dropout", "nbytes"),
    [
        # 8 heads * 512 / 64 = 64 pieces, 512 / 256 = 2 blocks of keys: 2 parts of 4096 rows, each
        # 64 results and a sum in float.
        ((1, 8, 512, 64), (1, 8, 512, 64), A100, 0.0, 2 * 4096 * 65 * 4),
        # 8 * 16 * 8 = 1024 pieces.
        ((8, 16, 512, 64), (8, 16, 512, 64), A100, 0.0, 0),
        # Head dimension 80 is rounded to 96; blocks of 128 keys: 4. 64 n of 216: n = 3 uses 89 %,
        # but 3 parts hold 2 blocks, as 2 parts do; 4 are two waves of 256 / 432 = 59 %, as are
        # 2 parts of 128 / 216 = 59 %, which are fewer.
        ((1, 8, 512, 80), (1, 8, 512, 80), A100, 0.0, 2 * 4096 * 97 * 4),
        # Head dimension 256: blocks of 64 keys.
        ((1, 1, 64, 256), (1, 1, 128, 256), A100, 0.0, 2 * 64 * 257 * 4),
        # One query, 4 heads for one of keys: 8 heads of 4 queries; 8 pieces, 8 blocks of 128 keys.
        ((1, 32, 1, 128), (1, 8, 1024, 128), A100, 0.0, 8 * 8 * 4 * 129 * 4),
        # One query, as many heads of keys: 32 pieces. 4 parts (128 of 216) use 59 %, as 8 (256
        # of 432) do; 5 to 7 hold two blocks as 4 do; 3 use 44 %, less than 85 % of 59 %.
        ((1, 32, 1, 128), (1, 32, 1024, 128), A100, 0.0, 4 * 32 * 129 * 4),
        # Dropout does not split: rng_state, two uint64, is allocated a second time.
        ((1, 8, 512, 64), (1, 8, 512, 64), A100, 0.1, 0),
        # 16 * 12 = 192 pieces of 264 processors (73 %; below 80 %), 3 blocks of keys: 2 parts use
        # 384 of 528 (73 %), 3 parts 576 of 792 (73 %): one is enough, and nothing is split. With
        # 16 * 8 = 128 pieces, 2 blocks: 256 of 264.
        ((1, 16, 768, 64), (1, 16, 768, 64), SXM, 0.0, 0),
        ((1, 16, 512, 64), (1, 16, 512, 64), SXM, 0.0, 2 * 16 * 512 * 65 * 4),
    ],
)
def test_flash_forward(query: Any, key: Any, gpu: Gpu, dropout: float, nbytes: int) -> None:
    with on_gpu(), use_gpu(gpu):
        q, k = (torch.empty(x, dtype=BF16) for x in (query, key))
        assert estimate(FLASH, q, k, k, dropout, False) == nbytes


@pytest.mark.parametrize(
    ("query", "key_heads", "keys", "dense", "deterministic", "nbytes"),
    [
        # 2 * 4 * 256 rows (200 rounded to 128): one sum and 64 floats each.
        ((2, 4, 200, 64), 4, 200, True, False, 2 * 4 * 256 * 65 * 4),
        # Head dimensions: 72 to 96; over 128 to a multiple of 64: 136 to 192.
        ((2, 4, 128, 72), 4, 128, True, False, 2 * 4 * 128 * 97 * 4),
        ((2, 4, 128, 136), 4, 128, True, False, 2 * 4 * 128 * 193 * 4),
        # The gradient and the result in the order of rows, 2 * 4 * 128 * 64 halves each.
        ((2, 4, 128, 64), 4, 128, False, False, 2 * 4 * 128 * 65 * 4 + 4 * 4 * 128 * 64 * 2),
        # Keys and values of 192 rows for all 8 heads, in bfloat16.
        ((2, 8, 128, 64), 2, 192, True, False, 2 * 8 * 128 * 65 * 4 + 2 * 2 * 8 * 192 * 64 * 2),
        # A part for each writer: 108 multiprocessors for 2 * 4 heads: 14.
        ((2, 4, 128, 64), 4, 128, True, True, 2 * 4 * 128 * (1 + 14 * 64) * 4),
    ],
)
def test_flash_backward(
    query: Any, key_heads: int, keys: int, dense: bool, deterministic: bool, nbytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    batch, _, queries, head_dim = query
    with on_gpu():
        q, k = make(*query), make(batch, key_heads, keys, head_dim)
        if not dense:
            q, k = q.contiguous(), k.contiguous()
        results, _ = run_kernel(FLASH, q, k, k, 0.0, False)
        result, sums, *_, state, unused, _mask = results
        assert nbytes == estimate(
            aten._scaled_dot_product_flash_attention_backward.default,
            result, q, k, k, result, sums, None, None, queries, keys, 0.0, False, state, unused,
        )  # fmt: skip


def test_flash_called_by_rows() -> None:
    """As xformers and ``torch.nn.attention.varlen`` call it: heads after rows, or sequences."""
    forward = aten._flash_attention_forward.default
    backward = aten._flash_attention_backward.default
    with on_gpu(), use_gpu(A100):
        q = make(1, 8, 512, 64).transpose(1, 2)
        (result, sums, state, unused, _), taken = run_kernel(
            forward, q, q, q, None, None, 512, 512, 0.0, False, False
        )
        assert taken == 2 * 4096 * 65 * 4  # in 2 parts, as above
        saved = (q, q, q, result, sums)
        options = (512, 512, 0.0, False, state, unused)
        assert estimate(backward, result, *saved, None, None, *options) == 4096 * 65 * 4
        starts = torch.empty(3, dtype=torch.int32)
        flat, few = q.flatten(0, 1), q.flatten(0, 1)[:, :2]
        lengths = (starts, starts, 300, 300, 0.0, False)
        assert estimate(forward, flat, few, few, *lengths, False) == 0
        # 128 rows more for each of 2 sequences; keys and values for all heads.
        taken = estimate(backward, flat, flat, few, few, flat, sums, *lengths, state, unused)
        assert taken == (512 + 256) * 8 * 65 * 4 + 2 * 512 * 8 * 64 * 2


def test_flash_backward_takes_a_block_for_each_buffer() -> None:
    with on_gpu():
        q, k = make(2, 8, 128, 64), make(2, 2, 192, 64)
        call = OperatorCall((q, q, k, k, q), {}, outputs=(q, k, k))
        blocks = CUDA.estimate_workspace(
            aten._scaled_dot_product_flash_attention_backward.default, call
        )
    taken = [nbytes for block, nbytes in blocks if block < 0 or nbytes > 0]  # type: ignore[union-attr]
    rows, keys = 2 * 8 * 128, 2 * 8 * 192 * 64 * 2
    # mha_bwd: dq, dk, dv, softmax_d, dq_accum, dk_expanded, dv_expanded.
    assert taken == [0, 0, 0, rows * 4, rows * 64 * 4, keys, keys]


# -- Memory-efficient: kernel_forward.h, kernel_backward.h --


@pytest.mark.parametrize(
    ("dtype", "head_dim", "gpu", "dropout", "blocks"),
    [
        # Rows, columns and largest head dimension, in cutlassB.h's order.
        (BF16, 32, A100, False, (64, 64, 32)),
        (BF16, 40, A100, False, (64, 64, 64)),
        (BF16, 72, A100, False, (128, 128, 128)),
        (BF16, 136, A100, False, (128, 64, ANY)),
        # 128 x 128 takes 133632 bytes of shared memory (bfloat16), and an L4 has 99 KiB.
        (BF16, 128, L4, False, (64, 64, 128)),
        # 128 x 64 for sm86 and sm89, to 96; there is none with dropout.
        (F16, 96, L4, False, (128, 64, 96)),
        (F16, 96, L4, True, (64, 64, 128)),
        # 162304 bytes with dropout fit in 163 KiB.
        (F16, 128, A100, True, (128, 128, 128)),
        (F16, 64, H100, True, (64, 64, 64)),
        (F32, 64, A100, False, (64, 64, 64)),
        (F32, 128, A100, False, (128, 64, 128)),
        (F32, 128, L4, False, (64, 64, 128)),
        (F32, 160, A100, False, (128, 64, ANY)),
        (F32, 160, L4, False, (64, 64, ANY)),
        (F16, 128, T4, False, (128, 64, 128)),
        (F16, 256, T4, False, (128, 64, ANY)),
        (F32, 64, T4, False, (64, 64, ANY)),
    ],
)
def test_the_first_efficient_kernel_that_fits(
    dtype: torch.dtype, head_dim: int, gpu: Gpu, dropout: bool, blocks: tuple[int, int, int]
) -> None:
    x = torch.empty(2, 4, 128, head_dim, dtype=dtype, device="meta")
    with use_gpu(gpu):
        kernel = choose_kernel(x, x, dropout)
    assert (kernel.rows, kernel.columns, kernel.max_head_dim) == blocks


BLOCK = 16 + 64 * 64 * 4
PARTS = 64 * (128 + 128) * 4


@pytest.mark.parametrize(
    ("query", "dtype", "gpu", "dense", "nbytes"),
    [
        # A100, 128: blocks of 128 x 128 in registers. Sums of 2 * 4 * 200 rows; for each of the 8
        # heads 2 x 1 blocks of 16 + 128 * 128 * 4 bytes for the query's gradient.
        ((2, 4, 200, 128), BF16, A100, True, 8 * 200 * 4 + 8 * 2 * (16 + 128 * 128 * 4)),
        # L4, 128: 64 x 64. Keys: 200 / 64 = 4 parts of 64 rows, 128 wide (a multiple of 64), in
        # float, for keys and for values; queries: 4 x 2 blocks.
        ((2, 4, 200, 128), BF16, L4, True, 8 * (200 * 4 + 4 * PARTS + 4 * 2 * BLOCK)),
        # Much work splits keys less: 200 / (16 * 4) = 3 of the 4 parts; 200 / 256 is none: one.
        ((16, 4, 200, 128), BF16, L4, True, 64 * (200 * 4 + 3 * PARTS + 4 * 2 * BLOCK)),
        ((64, 4, 200, 128), BF16, L4, True, 256 * (200 * 4 + 1 * PARTS + 4 * 2 * BLOCK)),
        # Float sums outside of the kernel. A100, 64: 64 x 64. Per head 2 x 1 blocks of 32800
        # bytes: 262400 beside the sums of 1024 rows (4096). The products before that, 2 * 4 * 128
        # * 64 * 4 = 262144, with their sums and those in the other order: 270336, which is more.
        ((2, 4, 128, 64), F32, A100, True, 262144 + 2 * 4096),
        # With 65 queries the blocks are the same, and the products 133120: the workspace is more.
        ((2, 4, 65, 64), F32, A100, True, 2 * 4 * 65 * 4 + 262400),
        # A gradient in another order is copied.
        ((2, 4, 128, 64), F32, A100, False, 262144 + 262144 + 2 * 4096),
    ],
)
def test_efficient_backward(
    query: Any, dtype: torch.dtype, gpu: Gpu, dense: bool, nbytes: int
) -> None:
    with on_gpu(), use_gpu(gpu):
        q = make(*query, dtype=dtype)
        (result, sums, seed, offset), _ = run_kernel(EFFICIENT, q, q, q, None, True)
        grad = result if dense else torch.empty(query, dtype=dtype)
        operands = (grad, q, q, q, None, result, sums, seed, offset, 0.0, [True] * 3 + [False])
        backward = aten._scaled_dot_product_efficient_attention_backward.default
        assert estimate(backward, *operands) == nbytes


# attention.cu, process_chunk: batches of at most 65535. Beside the results of all: the first
# chunk's, and those of 100 with what they are added up in; or before there are any, the first
# chunk's with what they are added up in. Sums of 16 rows are rounded up to 32.
MOST = 65535
ROW, WIDE, ADDED = 16 * 8 * 4 + 32 * 4, 16 * 136 * 2 + 32 * 4, 16 * 136 * 4


@pytest.mark.parametrize(
    ("sizes", "dtype", "nbytes"),
    [
        ((2, 4, 16, 128), BF16, 0),
        # Over 128 a half result is added up in float; a float one in the result itself.
        ((2, 4, 16, 136), BF16, 2 * 4 * ADDED),
        ((2, 4, 16, 136), F32, 0),
        ((MOST, 1, 16, 8), F32, 0),
        ((MOST + 100, 1, 16, 8), F32, MOST * ROW + 100 * ROW),
        (
            (MOST + 100, 1, 16, 136),
            BF16,
            max(
                MOST * (WIDE + ADDED) - (MOST + 100) * WIDE,
                MOST * WIDE + 100 * (WIDE + ADDED),
            ),
        ),
    ],
)
def test_efficient_forward(sizes: Any, dtype: torch.dtype, nbytes: int) -> None:
    with on_gpu():
        x = make(*sizes, dtype=dtype)
        assert estimate(EFFICIENT, x, x, x, None, True) == nbytes


def test_efficient_backward_of_large_batches() -> None:
    with on_gpu():
        x = make(MOST + 100, 1, 16, 8, dtype=F32)
        scalar = torch.empty((), dtype=torch.int64, device="cpu")
        sums = torch.empty(MOST + 100, 1, 32)

        def run(batch: int) -> int:
            part = x[:batch]
            kept = (None, part, sums[:batch], scalar, scalar)
            backward = aten._scaled_dot_product_efficient_attention_backward.default
            return estimate(backward, *[part] * 4, *kept, 0.0, [True, True, True, False])

        # Three gradients of the first chunk, and what its kernel holds.
        assert run(MOST + 100) == 3 * MOST * 16 * 8 * 4 + run(MOST)
        with pytest.raises(RuntimeError, match=r"when the batch size exceeds \(65535\)"):
            run_kernel(EFFICIENT, x, x, x, None, True, 0.1)


@pytest.mark.parametrize(("dtype", "head_dim"), [(BF16, 64), (F16, 160), (F32, 64)])
def test_efficient_called_by_rows(dtype: torch.dtype, head_dim: int) -> None:
    """As xformers calls it: the same kernels, on tensors with heads after rows."""
    forward = aten._efficient_attention_forward.default
    backward = aten._efficient_attention_backward.default
    other = aten._scaled_dot_product_efficient_attention_backward.default
    with on_gpu(), use_gpu(A100):
        q = make(2, 4, 128, head_dim, dtype=dtype)
        (_, sums, seed, offset), taken = run_kernel(EFFICIENT, q, q, q, None, True)
        operands = (q, q, q, q, None, q, sums, seed, offset, 0.0, [True] * 3 + [False])
        expected = (taken, estimate(other, *operands))
        rows = q.transpose(1, 2)
        results, taken = run_kernel(forward, rows, rows, rows, *[None] * 5, 0.0, 0, True)
        assert [x.device.type for x in results[2:4]] == ["cpu"] * 2
        nothing = torch.empty(0, device="cpu")  # xformers' seed where there is no dropout
        gradients, given = run_kernel(
            backward, rows, rows, rows, rows, rows[:, 0, 0, 0], rows, None, None, 128, 128, sums,
            0.0, nothing, nothing, custom_mask_type=0, bias_requires_grad=False,
        )  # fmt: skip
        assert (taken, given) == expected and gradients[3].numel() == 0


# -- cuDNN: MHA.cpp, scaled_dot_product_flash_attention.h --

# dQ_accum and softmax_sum: 2 * 4 * 256 rows of 64 + 1 floats. A gradient whose rows are not
# dense is copied.
SUMS = 2 * 4 * 256 * 65 * 4


@pytest.mark.parametrize(
    ("keys", "dense", "nbytes"),
    [(256, True, SUMS), (200, True, SUMS), (256, False, SUMS + 2 * 4 * 256 * 64 * 2)],
)
def test_cudnn_backward(keys: int, dense: bool, nbytes: int) -> None:
    with on_gpu(), use_gpu(H100):
        q = torch.empty(2, 4, 256, 64, dtype=F16)
        k = torch.empty(2, 4, keys, 64, dtype=F16)
        results, _ = run_kernel(CUDNN, q, k, k, None, True)
        result, sums, *_, seed, offset, _mask = results
        grad = result if dense else torch.empty((), dtype=F16).expand(q.shape)
        assert nbytes == estimate(
            aten._scaled_dot_product_cudnn_attention_backward.default,
            grad, q, k, k, result, sums, seed, offset, None, None, None, 256, keys, 0.0, False,
        )  # fmt: skip
    assert CUDA.unmodelled.keys() >= {CUDNN}


# -- Outputs: strides and devices; shapes and types are those of saved_sets/networks.py --


def test_outputs_lie_as_those_of_the_kernels() -> None:
    with on_gpu():
        q = torch.empty(2, 16, 4, 64, dtype=F16).transpose(1, 2)
        flash, _ = run_kernel(FLASH, q, q, q, 0.1, False)
        assert {x.device for x in flash if isinstance(x, Tensor)} == {q.device}
        for needs_sums in (True, False):
            cudnn, nbytes = run_kernel(CUDNN, q, q, q, None, needs_sums, 0.125)
            result, sums, *_, queries, keys, seed, offset, mask = cudnn
            assert nbytes == 0 and (queries, keys, mask) == (16, 16, None)
            assert (sums is not None) is needs_sums
            assert {x.device for x in (result, seed, offset)} == {q.device}
        assert result.stride() == flash[0].stride() == q.stride()
        # Values of another size keep the order of the queries.
        result = run_kernel(CUDNN, q, q, make(2, 4, 16, 32, dtype=F16), None, True)[0][0]
        assert result.shape == (2, 4, 16, 32) and result.transpose(1, 2).is_contiguous()
        q, v = torch.empty(2, 4, 40, 64), torch.empty(2, 4, 40, 32)
        for needs_sums, rows in ((True, 64), (False, 0)):  # rows: 40 to a multiple of 32
            (result, sums, *seeds), _ = run_kernel(EFFICIENT, q, q, v, None, needs_sums)
            assert result.shape == (2, 4, 40, 32) and result.transpose(1, 2).is_contiguous()
            assert (sums.shape, sums.device) == ((2, 4, rows), q.device)
            # Note [Seed and Offset Device]
            assert {x.device for x in seeds} == {torch.device("cpu")}
