"""Embeddings on CUDA, against ``Embedding.cu``, ``EmbeddingBag.cu`` and the kernels of both."""

from __future__ import annotations

import pytest
import torch
from cuda_steps import estimate, made, run_step, saved
from torch import Tensor, nn

from fxmem.graph import Phase
from fxmem.kernels.cuda.sorting import radix_sort_bytes, scan_bytes

aten = torch.ops.aten


def indices(*sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=torch.int64)


def backward(count: int, weights: int, width: int, dtype: torch.dtype = torch.float32) -> int:
    grad, found = torch.empty(count, width, dtype=dtype), indices(count)
    return estimate(aten.embedding_dense_backward.default, grad, found, weights, -1, False)


def test_few_indices_need_no_order(gpu: None) -> None:
    assert backward(3072, 50257, 768) == 0
    assert backward(3073, 50257, 768) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_up_ten_at_a_time(dtype: torch.dtype, gpu: None) -> None:
    # 8192 tokens of a vocabulary of 50257, 768 wide: at most 8192 segments; in parts of ten rows,
    # 819 + 8192, whose sums are floats. Beside them indices in order and where they were, where
    # segments begin, their number, how many parts each has and where those begin (with a total).
    parts = 819 + 8192
    expected = 2 * 8192 * 8 + 8192 * 8 + 8 + 2 * 8192 * 8 + 8 + parts * 8 + parts * 768 * 4
    assert backward(8192, 50257, 768, dtype) == expected


def test_few_weights_are_added_to_at_once(gpu: None) -> None:
    # 8192 rows for 2 weights: 2 * 768 / 768 = 2 blocks, and 819 + 2 parts: the fused kernel.
    parts = 821
    expected = 2 * 8192 * 8 + 8192 * 8 + 8 + 2 * 2 * 8 + 8 + parts * 8 + parts * 8
    peak = 2 * 8192 * 8 + 8192 * 8 + radix_sort_bytes(8192, 8, 8)  # while they are sorted
    peak -= 2 * 768 * 4  # when the result is not there yet
    assert backward(8192, 2, 768) == max(expected, peak)
    # In half precision they are added up in floats.
    parts_of_half = expected + 2 * 768 * 4
    assert backward(8192, 2, 768, torch.bfloat16) >= parts_of_half


def test_deterministic_algorithms_do_not_add_atomically(gpu: None) -> None:
    fused = backward(81920, 2, 768)
    torch.use_deterministic_algorithms(True)
    try:
        assert backward(81920, 2, 768) > fused
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_step() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Sigmoid())
    graph = run_step(model, indices(2, 3))
    assert made(graph)[0] == ("embedding", 96)
    assert saved(graph) == [((2, 3, 4), "float32")]  # by the sigmoid; the indices are there
    assert made(graph, Phase.BACKWARD)[-1] == ("embedding_dense_backward", 160)


@pytest.mark.parametrize(("mode", "maxima"), [("sum", 0), ("mean", 0), ("max", 2 * 4 * 8)])
def test_bags(mode: str, maxima: int) -> None:
    model = nn.EmbeddingBag(10, 4, mode=mode)
    graph = run_step(model, indices(2, 3))
    # The bags, the bag of each of 6 indices, the size of each bag; of maxima, their indices.
    name, nbytes = made(graph)[-1]
    assert (name, nbytes) == ("_embedding_bag", 2 * 4 * 4 + 6 * 8 + 2 * 8 + maxima)


def test_gradients_of_bags_are_sorted_whatever_their_number(gpu: None) -> None:
    grad, found = torch.empty(2, 4), indices(6)
    args = (grad, found, indices(2), indices(6), indices(2), indices(0), 10, False)
    parts = 0 + 6
    expected = 2 * 48 + 48 + 8 + 2 * 48 + 8 + parts * 8 + parts * 4 * 4
    tiles = 2 * 48 + 48 + 8 + 2 * 48 + scan_bytes(6, 8)  # running sums of few parts
    operator = aten._embedding_bag_backward.default
    assert estimate(operator, *args, 0, False, None) == max(expected, tiles)
    assert estimate(operator, *args, 2, False, None) == 0
