"""Indexing, embeddings, sorting and running sums on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_steps import estimate, made, make_buffers_test, on_gpu, run_step, saved, workspaces
from running import Runs
from torch import Tensor, nn

from benchmarks.kernel_workspace import estimate_workspace_bytes
from fxmem import analyze
from fxmem.graph import NEXT_RESULT, Phase
from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.sorting import radix_sort_bytes, scan_bytes

aten = torch.ops.aten
MIB = 1 << 20
I32, I64 = torch.int32, torch.int64
HOST = torch.device("cpu")
empty = torch.empty


def indices(*sizes: int, dtype: torch.dtype = I64, device: Any = None) -> Tensor:
    return torch.zeros(sizes, dtype=dtype, device=device)


def spread_rows() -> Tensor:
    return empty(16).expand(50, 16)


def mask(*sizes: int) -> Tensor:
    return empty(*sizes) > 0


def sort_pairs(count: int, bits: int = 64) -> int:
    return radix_sort_bytes(count, 8, 8, bits)


def put(*sizes: int, at: tuple[int | None, ...], values: Any) -> Any:
    """Arguments of index_put_, with indices of these numbers, and whether values are added."""
    return lambda: (
        empty(sizes),
        [None if i is None else indices(i) for i in at],
        values() if callable(values) else empty(values),
        True,
        True,
    )


def x() -> Tensor:
    return empty(100, 16)


PLACES = 2400 * 8 + scan_bytes(2400, 8)
MEAN = 800 * 4 + 1600 * 4 + 1600
PUT = "_index_put_impl_"
INDEXING = [
    # TensorAdvancedIndexing.cpp, index: indices of 64 bits, on the GPU.
    ("index.Tensor", lambda: (x(), [indices(50)]), 0),
    ("index.Tensor", lambda: (x(), [indices(50, dtype=I32)]), 400),
    ("index.Tensor", lambda: (x(), [indices(50, dtype=I32, device=HOST)]), 400),
    # AdvancedIndex: of strides (1, 0) and (0, 1) both become dense, those of one layout stay.
    ("index.Tensor", lambda: (x(), [indices(30, 1), indices(10)]), 2 * 300 * 8),
    ("index.Tensor", lambda: (x(), [indices(30), indices(30)]), 0),
    # Indexing.cu, index_put_with_sort_kernel: 50 rows of (100, 16): the index in elements, those
    # in order, where they were, 0 to 49; CUB sorts as few in one tile. Values are made dense.
    (PUT, put(100, 16, at=(50,), values=(50, 16)), 4 * 400 + 1),
    (PUT, put(100, 16, at=(50,), values=spread_rows), 4 * 400 + 1 + 50 * 16 * 4),
    (PUT, lambda: (x(), [indices(50)], empty(50, 16), False, True), 0),
    # Two apart from each other: the indexed dimensions come to the front of a copy.
    (PUT, put(10, 20, 30, at=(7, None, 7), values=(7, 20)), 24000 + 4 * 56 + 1),
    (PUT, put(10, 20, 30, at=(7, 7), values=(7, 30)), 4 * 56 + 1),
    # Many: 99 has 7 bits, one pass of CUB's without a copy; 999 has 10 bits.
    (PUT, put(100, 16, at=(10**5,), values=(10**5, 16)), 32 * 10**5 + sort_pairs(10**5, 7)),
    (PUT, put(1000, 16, at=(10**5,), values=(10**5, 16)), 32 * 10**5 + sort_pairs(10**5, 10)),
    # Masks become positions: 12 values, of two dimensions each; a single one fills.
    ("index_put_", lambda: (empty(4, 6), [mask(4, 6)], empty(12)), 12 * 2 * 8),
    ("index_put_", lambda: (empty(4, 6), [mask(4, 6)], empty(())), 0),
    # IndexKernel.cpp, masked_scatter__cuda: the place of each element; a mask is expanded.
    ("masked_scatter_", lambda: (empty(40, 60), mask(40, 60), empty(40, 60)), PLACES),
    ("masked_scatter_", lambda: (empty(40, 60), mask(1, 60), empty(40, 60)), 2400 + PLACES),
    # scatter_reduce_two: ones like the source, counts like the result, and the mask of zeros.
    ("scatter_reduce.two", lambda: (x(), 0, indices(50, 16), empty(50, 16), "mean"), MEAN),
    ("scatter_reduce.two", lambda: (empty(9, 9), 0, indices(5, 9), empty(5, 9), "amax"), 0),
]

BY_VALUE, BY_LINE = 50000 * 4 + radix_sort_bytes(50000, 4, 8), radix_sort_bytes(50000, 8, 0, 4)
SEGMENTED = 640000 * 8 + 640000 * 12 + 255
SORTING = [
    # Sort.cpp: to 4096 in place, with 0 to 4095.
    ("sort", lambda: (empty(80, 4096),), 4096 * 8),
    ("sort", lambda: (empty(80, 90), 0), 80 * 8),
    # One line: 0 to 99999; CUB keeps a second copy of values and indices.
    ("sort", lambda: (empty(100000),), 800000 + radix_sort_bytes(100000, 4, 8)),
    # Some lines together: by value with (index, line) pairs, then by line.
    ("sort", lambda: (empty(10, 5000),), 16 * 50000 + max(BY_VALUE, BY_LINE)),
    # Many lines. CUB aligns its parts, and asks for 255 bytes to do so: a block more, as
    # Liger-Kernel's benchmark of sparsemax measured for 2048 lines of 8192 (704.00048828125 MiB,
    # RTX 3090). Along another dimension: lines made dense, with results of their own.
    ("sort", lambda: (empty(128, 5000),), SEGMENTED),
    ("sort", lambda: (empty(128, 5000).t(), 0), SEGMENTED),
    ("sort", lambda: (empty(5000, 128), 0), 640000 * 16 + SEGMENTED),
    # TensorTopK.cu. 8 lines of 50257: 108 multiprocessors hold 6 blocks of 256 threads; 402056 /
    # 165888 = 3 items by thread, at least 4; 50 blocks by line.
    ("topk", lambda: (empty(64, 1000), 5), 0),
    ("topk", lambda: (empty(1000, 64).t(), 5), 256000),
    ("topk", lambda: (empty(8, 50257), 5), 8 * 16 + 400 * (512 + 8) + scan_bytes(400, 4)),
    # ScanUtils.cuh: the input in the result's type, contiguous; CUB where all is one line.
    ("cumsum", lambda: (empty(80, 90), 1), 0),
    ("cumsum", lambda: (empty(80, 90).t(), 1), 28800),
    ("cumsum", lambda: (mask(80, 90), 1), 57600),
    ("cumsum", lambda: (empty(7200), 0), scan_bytes(7200, 4)),
    # Distributions.cpp, multinomial_out: a race; normalized weights, added up.
    ("multinomial", lambda: (empty(8, 90), 1), 2880),
    ("multinomial", lambda: (empty(8, 90), 3), 2880 + 24 * 4),
    ("multinomial", lambda: (empty(8, 90), 3, True), 2 * 2880),
    ("randperm", lambda: (0,), 0),
]


def embedding_backward(count: int, weights: int, dtype: torch.dtype = torch.float32) -> Any:
    return lambda: (empty(count, 768, dtype=dtype), indices(count), weights, -1, False)


def bag_backward(mode: int) -> Any:
    return lambda: (
        empty(2, 4), *map(indices, (6, 2, 6, 2, 0)), 10, False, mode, False, None,
    )  # fmt: skip


# Embedding.cu. 8192 tokens of a vocabulary of 50257, 768 wide: at most 8192 segments; in parts of
# ten rows, 819 + 8192, whose sums are floats. Beside them indices in order and where they were,
# where segments begin, their number, how many parts each has and where those begin (with a total).
PARTS = 819 + 8192
MANY = 2 * 8192 * 8 + 8192 * 8 + 8 + 2 * 8192 * 8 + 8 + PARTS * 8 + PARTS * 768 * 4
# 8192 rows for 2 weights: 2 * 768 / 768 = 2 blocks, and 819 + 2 parts: the fused kernel. Before
# the result is there, they are sorted.
FUSED = 2 * 8192 * 8 + 8192 * 8 + 8 + 2 * 2 * 8 + 8 + 821 * 8 + 821 * 8
FUSED = max(FUSED, 2 * 8192 * 8 + 8192 * 8 + radix_sort_bytes(8192, 8, 8) - 2 * 768 * 4)
BAGS = max(
    2 * 48 + 48 + 8 + 2 * 48 + 8 + 6 * 8 + 6 * 4 * 4,
    2 * 48 + 48 + 8 + 2 * 48 + scan_bytes(6, 8),  # running sums of few parts
)
EMBEDDINGS = [
    ("embedding_dense_backward", embedding_backward(3072, 50257), 0),  # few need no order
    ("embedding_dense_backward", embedding_backward(8192, 50257), MANY),
    ("embedding_dense_backward", embedding_backward(8192, 50257, torch.bfloat16), MANY),
    ("embedding_dense_backward", embedding_backward(8192, 2), FUSED),
    ("_embedding_bag_backward", bag_backward(0), BAGS),
    ("_embedding_bag_backward", bag_backward(2), 0),
]


test_buffers = make_buffers_test(INDEXING + SORTING + EMBEDDINGS)


def test_deterministic_algorithms_do_not_add_atomically(monkeypatch: pytest.MonkeyPatch) -> None:
    make, operator = embedding_backward(81920, 2), aten.embedding_dense_backward.default
    with on_gpu():
        fused = estimate(operator, *make())
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert estimate(operator, *make()) > fused


@pytest.mark.parametrize(
    ("count", "dtype", "key_bytes", "bits"),
    [
        # Randperm.cu: ceil(log2(n - (6 n^2 + 1) / (12 log 0.9))), where 12 log 0.9 = -1.26433.
        (1, I64, 4, 3),  # 1 + 7 / 1.26433 = 6.5
        (1000, I64, 4, 23),  # 1000 + 6000001 / 1.26433 = 4746602; 2^22 = 4194304
        (30000, I32, 4, 32),  # 4.27e9; 2^32 = 4.29e9
        (31000, I64, 8, 33),  # 4.56e9
    ],
)
def test_permutations(count: int, dtype: torch.dtype, key_bytes: int, bits: int) -> None:
    # A range of the result's type; keys, and the sorted ones.
    keys = 2 * count * key_bytes + radix_sort_bytes(count, key_bytes, dtype.itemsize, bits)
    with on_gpu():
        found = estimate(aten.randperm.default, count, dtype=dtype)
    assert found == count * dtype.itemsize + keys


def test_masks_of_which_the_result_tells_the_count_and_the_host_s_indices() -> None:
    def ask(func: Any, *args: Any, result: Tensor | None = None) -> int:
        return estimate_workspace_bytes(CUDA, func, args, {}, args[0] if result is None else result)

    with on_gpu():
        select, index = aten.masked_select.default, aten.index.Tensor
        assert ask(select, empty(4, 6), mask(4, 6), result=empty(12)) == 12 * 2 * 8
        on_host, rows = empty(100, device=HOST) > 0, empty(50, 16)
        # positions in it are copied as indices are
        assert ask(index, x(), [on_host], result=rows) == 400
        # An index in the host's memory is computed there, and copied.
        put, at = aten._index_put_impl_.default, indices(50, device=HOST)
        assert ask(put, x(), [at], rows) == 400
        assert ask(put, x(), [at], rows, True, True) == 4 * 400 + 1


def test_indices_of_the_host_are_copied_to_the_gpu() -> None:
    # TensorAdvancedIndexingUtils.h, make_info: 8 MiB of indices beside weight and result.
    # The parameter of 4 MiB is read at indices that the code makes in the host's memory.
    weight, x = nn.Parameter(torch.zeros(1 << 20)), torch.zeros(())
    model = Runs(lambda net, x: (net.weight[torch.arange(1 << 20)] * x).sum(), weight=weight)
    reading = analyze(model, (x,), device="cuda", mode="infer", alloc_conf="")
    assert reading.peak_bytes == (4 + 8 + 4) * MIB + 512
    (index,) = (o for o in reading.graph.operations if o.name == "aten.index.Tensor")
    assert index.blocks == ((0, 8 * MIB), (NEXT_RESULT, 0), (0, -8 * MIB))
    # Indexing.cu, computeLinearIndex: computed on the host, the index is one copy; then those in
    # order, where they were, their range, and CUB's storage. Beside them lie the weight, its
    # gradient and the result's; x, the loss and its gradient have a block of 512 bytes each.
    adding = analyze(model, (x,), device="cuda", alloc_conf="")
    sort = radix_sort_bytes(1 << 20, 8, 8, 20)
    assert workspaces(adding.graph)["aten.index_put.default"] == 4 * 8 * MIB + sort
    assert adding.peak_bytes == (4 + 4 + 4 + 4 * 8) * MIB + -(-sort // 512) * 512 + 3 * 512


def test_gradients_of_what_was_read() -> None:
    def read(function: Callable[..., Tensor], index: Tensor) -> dict[str, int]:
        leaf = torch.zeros(100, 16, requires_grad=True)
        return workspaces(run_step(lambda x, i: function(x, i).sigmoid(), leaf, index))

    assert read(lambda x, i: x[i], indices(50)) == {"aten.index_put.default": 4 * 400 + 1}
    assert read(lambda x, i: x.index_select(0, i), indices(50)) == {}  # added in place
    assert read(lambda x, i: x.gather(0, i), indices(50, 16)) == {}


def test_a_step_with_embeddings() -> None:
    graph = run_step(nn.Sequential(nn.Embedding(10, 4), nn.Sigmoid()), indices(2, 3))
    assert made(graph)[0] == ("embedding", 96)
    assert saved(graph) == [((2, 3, 4), "float32")]  # by the sigmoid; the indices are there
    assert made(graph, Phase.BACKWARD)[-1] == ("embedding_dense_backward", 160)
    for mode, maxima in (("sum", 0), ("max", 2 * 4 * 8)):
        # The bags, the bag of each of 6 indices, the size of each bag; of maxima, their indices.
        graph = run_step(nn.EmbeddingBag(10, 4, mode=mode), indices(2, 3))
        assert made(graph)[-1] == ("_embedding_bag", 2 * 4 * 4 + 6 * 8 + 2 * 8 + maxima)


def test_a_step_draws_a_permutation() -> None:
    x = torch.zeros(64, 4, requires_grad=True)
    graph = run_step(lambda x: x[torch.randperm(64, device=x.device)], x)
    assert ("randperm", 3 * 64 * 8 + 1) in made(graph)  # result, range and twice 64 keys of 4
    on_host = run_step(lambda x: x[torch.randperm(64).to(x.device)], x)
    assert "randperm" not in dict(made(on_host))
