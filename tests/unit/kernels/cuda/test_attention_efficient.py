"""Memory-efficient attention's kernels and buffers, worked out by hand from kernel_backward.h."""

from __future__ import annotations

import pytest
import torch
from cuda_steps import estimate, on_gpu, run_kernel
from torch import Tensor

from fxmem.kernels.cuda.attention.efficient import choose_kernel
from fxmem.kernels.cuda.gpu import Gpu, use_gpu

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_efficient_attention.default
BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
T4, A100, L4, H100 = Gpu((7, 5)), Gpu((8, 0)), Gpu((8, 9)), Gpu((9, 0))
ANY = 65536


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
def test_the_first_kernel_that_fits(
    dtype: torch.dtype, head_dim: int, gpu: Gpu, dropout: bool, blocks: tuple[int, int, int]
) -> None:
    x = torch.empty(2, 4, 128, head_dim, dtype=dtype, device="meta")
    with use_gpu(gpu):
        kernel = choose_kernel(x, x, dropout)
    assert (kernel.rows, kernel.columns, kernel.max_head_dim) == blocks


def make(*sizes: int, dtype: torch.dtype) -> Tensor:
    """Batch, heads, rows, head dimension; in memory the rows before the heads."""
    batch, heads, rows, head_dim = sizes
    return torch.empty(batch, rows, heads, head_dim, dtype=dtype).transpose(1, 2)


def run_backward(
    query: tuple[int, ...], keys: int, dtype: torch.dtype, gpu: Gpu, *, is_dense: bool = True
) -> int:
    batch, heads, _queries, head_dim = query
    with on_gpu(), use_gpu(gpu):
        q = make(*query, dtype=dtype)
        k = make(batch, heads, keys, head_dim, dtype=dtype)
        (result, sums, seed, offset), _ = run_kernel(FORWARD, q, k, k, None, True)
        grad = result if is_dense else torch.empty(query, dtype=dtype)
        return estimate(
            BACKWARD, grad, q, k, k, None, result, sums, seed, offset, 0.0, [True] * 3 + [False]
        )


def test_half_types_sum_in_the_kernel() -> None:
    # A100, 128: blocks of 128 x 128 in registers. Sums of 2 * 4 * 200 rows; for each of the 8
    # heads 2 x 1 blocks of 16 + 128 * 128 * 4 bytes for the query's gradient.
    assert run_backward((2, 4, 200, 128), 200, BF16, A100) == (
        2 * 4 * 200 * 4 + 8 * 2 * (16 + 128 * 128 * 4)
    )


def test_gradients_of_keys_that_registers_do_not_hold() -> None:
    # L4, 128: 64 x 64. Keys: 200 / 64 = 4 parts of 64 rows, 128 wide (a multiple of 64), in float,
    # for keys and for values; queries: 4 x 2 blocks of 16 + 64 * 64 * 4.
    head = 4 * 64 * (128 + 128) * 4 + 4 * 2 * (16 + 64 * 64 * 4)
    assert run_backward((2, 4, 200, 128), 200, BF16, L4) == 2 * 4 * 200 * 4 + 8 * head


def test_much_work_splits_keys_less() -> None:
    # 200 / (16 * 4) = 3 of the 4 parts.
    head = 3 * 64 * (128 + 128) * 4 + 4 * 2 * (16 + 64 * 64 * 4)
    assert run_backward((16, 4, 200, 128), 200, BF16, L4) == 64 * 200 * 4 + 64 * head
    # 200 / 256 is none: one part.
    head = 1 * 64 * (128 + 128) * 4 + 4 * 2 * (16 + 64 * 64 * 4)
    assert run_backward((64, 4, 200, 128), 200, BF16, L4) == 256 * 200 * 4 + 256 * head


def test_float_sums_outside_of_the_kernel() -> None:
    # A100, 64: 64 x 64. Per head 2 x 1 blocks of 16 + 64 * 64 * 4 = 32800 bytes: 262400 beside
    # the sums of 1024 rows (4096). The products before that, 2 * 4 * 128 * 64 * 4 = 262144, with
    # their sums and those in the other order: 270336, which is more.
    assert run_backward((2, 4, 128, 64), 128, F32, A100) == 262144 + 2 * 4096
    # With 65 queries the blocks are the same, and the products 133120: the workspace is more.
    assert run_backward((2, 4, 65, 64), 65, F32, A100) == 2 * 4 * 65 * 4 + 262400


def test_a_gradient_in_another_order_is_copied() -> None:
    copied = 2 * 4 * 128 * 64 * 4
    assert run_backward((2, 4, 128, 64), 128, F32, A100, is_dense=False) == (
        copied + 262144 + 2 * 4096
    )


@pytest.mark.parametrize(
    ("dtype", "head_dim", "nbytes"),
    [
        (BF16, 128, 0),
        # Over 128 a half result is added up in float; a float one in the result itself.
        (BF16, 136, 2 * 4 * 16 * 136 * 4),
        (F32, 136, 0),
    ],
)
def test_forward(dtype: torch.dtype, head_dim: int, nbytes: int) -> None:
    with on_gpu():
        x = make(2, 4, 16, head_dim, dtype=dtype)
        assert estimate(FORWARD, x, x, x, None, True) == nbytes


def test_the_outputs_are_those_of_the_kernel() -> None:
    with on_gpu():
        q = torch.empty(2, 4, 40, 64)
        v = torch.empty(2, 4, 40, 32)
        for needs_sums, rows in ((True, 64), (False, 0)):  # rows: 40 to a multiple of 32
            (result, sums, seed, offset), _ = run_kernel(FORWARD, q, q, v, None, needs_sums)
            assert result.shape == (2, 4, 40, 32)
            assert result.transpose(1, 2).is_contiguous()
            assert (sums.shape, sums.dtype) == ((2, 4, rows), F32)
            assert result.device == sums.device == q.device
            for scalar in (seed, offset):  # Note [Seed and Offset Device]
                assert scalar.device == torch.device("cpu")
                assert (scalar.shape, scalar.dtype) == ((), torch.int64)


class TestLargeBatches:
    """attention.cu and attention_backward.cu, ``process_chunk``: batches of at most 65535."""

    MOST = 65535

    @pytest.mark.parametrize(
        ("head_dim", "dtype", "row", "accumulated"),
        [
            (8, F32, 16 * 8 * 4 + 32 * 4, 0),  # the result, and sums of 16 rows rounded up to 32
            (136, BF16, 16 * 136 * 2 + 32 * 4, 16 * 136 * 4),
        ],
    )
    def test_forward(self, head_dim: int, dtype: torch.dtype, row: int, accumulated: int) -> None:
        with on_gpu():
            x = make(self.MOST, 1, 16, head_dim, dtype=dtype)
            assert estimate(FORWARD, x, x, x, None, True) == self.MOST * accumulated
            x = make(self.MOST + 100, 1, 16, head_dim, dtype=dtype)
            # Beside the results of all: the first chunk's, and those of 100 with what they are
            # added up in. Before there are any: the first chunk's with what they are added up in.
            later = self.MOST * row + 100 * (row + accumulated)
            first = self.MOST * (row + accumulated) - (self.MOST + 100) * row
            assert (first > later) == bool(accumulated)
            assert estimate(FORWARD, x, x, x, None, True) == max(first, later)

    def test_backward(self) -> None:
        with on_gpu():
            x = make(self.MOST + 100, 1, 16, 8, dtype=F32)
            grad = make(self.MOST + 100, 1, 16, 8, dtype=F32)
            scalar = torch.empty((), dtype=torch.int64, device="cpu")
            sums = torch.empty(self.MOST + 100, 1, 32)

            def run(batch: int) -> int:
                operands = [y[:batch] for y in (grad, x, x, x)]
                saved = (None, x[:batch], sums[:batch], scalar, scalar)
                masks = [True, True, True, False]
                return estimate(BACKWARD, *operands, *saved, 0.0, masks)

            # Three gradients of the first chunk, and what its kernel holds.
            assert run(self.MOST + 100) == 3 * self.MOST * 16 * 8 * 4 + run(self.MOST)

    def test_dropout_is_refused_as_on_a_gpu(self) -> None:
        with on_gpu():
            x = make(self.MOST + 1, 1, 16, 8, dtype=F32)
            with pytest.raises(RuntimeError) as caught:
                run_kernel(FORWARD, x, x, x, None, True, 0.1)
            run_kernel(FORWARD, x[:-1], x[:-1], x[:-1], None, True, 0.1)
        assert str(caught.value) == (
            "Efficient attention cannot produce valid seed and offset outputs when the batch size "
            "exceeds (65535)."
        )
