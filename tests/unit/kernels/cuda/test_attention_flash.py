"""Flash attention's buffers, worked out by hand from flash_api.cpp."""

from __future__ import annotations

import pytest
import torch
from cuda_steps import estimate, on_gpu, run_kernel

from fxmem.kernels.cuda.attention.flash import count_splits
from fxmem.kernels.cuda.gpu import Gpu, use_gpu

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention.default
BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
A100 = 2 * 108
"""What an A100 runs at once: two blocks of threads per multiprocessor."""


@pytest.mark.parametrize(
    ("blocks", "processors", "key_blocks", "splits"),
    [
        (173, A100, 64, 1),  # 80 % of 216 is 172.8: enough without
        (172, A100, 1, 1),
        # 64, 128 of 216 processors: 85 % of the better one is 109.
        (64, A100, 2, 2),
        # The example in the source: with 48 of 108, two parts use 89 %.
        (48, 108, 64, 2),
        # 8 n of 216, n up to 8: 7 divides 8 blocks as 6 does, and 6 use less than 85 % of 8.
        (8, A100, 8, 8),
        # 100 * 2 = 200 (93 %); 4: 400 of 432 (93 %); 5: 500 of 648: two are the fewest.
        (100, A100, 5, 2),
        # At most 128 parts: 125 parts of 8 blocks are the best; 85 % of 125 is 106, and the first
        # number from there that changes the blocks of a part is 112, with 9.
        (1, A100, 1000, 112),
    ],
)
def test_keys_are_split(blocks: int, processors: int, key_blocks: int, splits: int) -> None:
    assert count_splits(blocks, processors, key_blocks) == splits


@pytest.mark.parametrize(
    ("query", "key", "nbytes"),
    [
        # 8 heads * 512 / 64 = 64 pieces, 512 / 256 = 2 blocks of keys: 2 parts of 4096 rows, each
        # 64 results and a sum in float.
        ((1, 8, 512, 64), (1, 8, 512, 64), 2 * 4096 * 65 * 4),
        # 8 * 16 * 8 = 1024 pieces.
        ((8, 16, 512, 64), (8, 16, 512, 64), 0),
        # Head dimension 80 is rounded to 96; blocks of 128 keys: 4. 64 n of 216: n = 3 uses 89 %,
        # but 3 parts hold 2 blocks, as 2 parts do; 4 are two waves of 256 / 432 = 59 %, as are
        # 2 parts of 128 / 216 = 59 %, which are fewer.
        ((1, 8, 512, 80), (1, 8, 512, 80), 2 * 4096 * 97 * 4),
        # Head dimension 256: blocks of 64 keys.
        ((1, 1, 64, 256), (1, 1, 128, 256), 2 * 64 * 257 * 4),
        # One query, 4 heads for one of keys: 8 heads of 4 queries; 8 pieces, 8 blocks of 128 keys.
        ((1, 32, 1, 128), (1, 8, 1024, 128), 8 * 8 * 4 * 129 * 4),
        # One query, as many heads of keys: 32 pieces. 4 parts (128 of 216) use 59 %, as 8 (256
        # of 432) do; 5 to 7 hold two blocks as 4 do; 3 use 44 %, less than 85 % of 59 %.
        ((1, 32, 1, 128), (1, 32, 1024, 128), 4 * 32 * 129 * 4),
    ],
)
def test_forward(query: tuple[int, ...], key: tuple[int, ...], nbytes: int) -> None:
    with on_gpu():
        q, k = (torch.empty(x, dtype=torch.bfloat16) for x in (query, key))
        assert estimate(FORWARD, q, k, k, 0.0, False) == nbytes


def test_dropout_does_not_split() -> None:
    with on_gpu():
        q = torch.empty(1, 8, 512, 64, dtype=torch.bfloat16)
        # rng_state, two uint64, is allocated a second time.
        assert estimate(FORWARD, q, q, q, 0.1, False) == 16


def test_more_multiprocessors_split_more() -> None:
    with on_gpu(), use_gpu(Gpu((9, 0), multiprocessors=132)):
        q = torch.empty(1, 16, 768, 64, dtype=torch.bfloat16)
        # 16 * 12 = 192 pieces of 264 processors (73 %; below 80 %), 3 blocks of keys: 2 parts use
        # 384 of 528 (73 %), 3 parts 576 of 792 (73 %): one is enough, and nothing is split.
        assert estimate(FORWARD, q, q, q) == 0
        # 16 * 8 = 128 pieces, 2 blocks: 256 of 264.
        q = torch.empty(1, 16, 512, 64, dtype=torch.bfloat16)
        assert estimate(FORWARD, q, q, q) == 2 * 16 * 512 * 65 * 4


def run_backward(
    query: tuple[int, ...], key_heads: int, *, is_transposed: bool = True, keys: int | None = None
) -> int:
    """Buffers of a backward whose gradient and result lie as the queries do."""
    batch, heads, queries, head_dim = query

    def make(heads: int, rows: int) -> torch.Tensor:
        if is_transposed:
            result = torch.empty(batch, rows, heads, head_dim, dtype=torch.bfloat16)
            return result.transpose(1, 2)
        return torch.empty(batch, heads, rows, head_dim, dtype=torch.bfloat16)

    with on_gpu():
        q, k = make(heads, queries), make(key_heads, keys or queries)
        results, _ = run_kernel(FORWARD, q, k, k, 0.0, False)
        result, sums, *_, state, unused, _mask = results
        return estimate(
            BACKWARD, result, q, k, k, result, sums, None, None, queries, keys or queries,
            0.0, False, state, unused,
        )  # fmt: skip


def test_backward_adds_up_in_float() -> None:
    # 2 * 4 * 256 rows (200 rounded to 128): one sum and 64 floats each.
    assert run_backward((2, 4, 200, 64), 4) == 2 * 4 * 256 * 65 * 4


def test_backward_rounds_the_head_dimension() -> None:
    # 72 to 96; over 128 to a multiple of 64: 136 to 192.
    assert run_backward((2, 4, 128, 72), 4) == 2 * 4 * 128 * 97 * 4
    assert run_backward((2, 4, 128, 136), 4) == 2 * 4 * 128 * 193 * 4


def test_backward_copies_what_is_not_in_the_order_of_rows() -> None:
    # The gradient and the result, 2 * 4 * 128 * 64 elements of 2 bytes each.
    assert run_backward((2, 4, 128, 64), 4, is_transposed=False) == (
        2 * 4 * 128 * 65 * 4 + 2 * 2 * 4 * 128 * 64 * 2
    )


def test_grouped_queries_have_gradients_for_every_head() -> None:
    # Keys and values of 192 rows for all 8 heads, in bfloat16.
    assert run_backward((2, 8, 128, 64), 2, keys=192) == (
        2 * 8 * 128 * 65 * 4 + 2 * 2 * 8 * 192 * 64 * 2
    )


def test_a_deterministic_backward_has_a_part_for_each_writer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    # 108 multiprocessors for 2 * 4 heads: 14 parts.
    assert run_backward((2, 4, 128, 64), 4) == 2 * 4 * 128 * (1 + 14 * 64) * 4


def test_the_outputs_are_those_of_the_kernel() -> None:
    with on_gpu():
        q = torch.empty(2, 16, 4, 64, dtype=torch.float16).transpose(1, 2)
        results, _ = run_kernel(FORWARD, q, q, q, 0.1, False)
    result, sums, *_, state, unused, mask = results
    assert (result.shape, result.stride(), result.dtype) == (q.shape, q.stride(), q.dtype)
    assert (sums.shape, sums.dtype) == ((2, 4, 16), torch.float32)
    assert (state.shape, state.dtype) == ((2,), torch.uint64)
    assert (unused.shape, unused.dtype) == ((), torch.uint64)
    assert mask.numel() == 0
    assert {x.device for x in (result, sums, state, unused)} == {q.device}
