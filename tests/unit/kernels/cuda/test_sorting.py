"""Sorting, scans and rolling on CUDA, against ``Sort.cpp``, ``TensorTopK.cu`` and others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_steps import estimate, made, on_gpu, run_step

from fxmem.kernels.cuda import CUDA
from fxmem.kernels.cuda.sorting import radix_sort_bytes, scan_bytes

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if "step" in request.function.__name__:  # which makes its own
        yield
        return
    with on_gpu():
        yield


def test_short_lines_are_sorted_in_place() -> None:
    assert estimate(aten.sort.default, torch.empty(80, 4096)) == 4096 * 8  # 0 to 4095
    assert estimate(aten.sort.stable, torch.empty(80, 90), stable=False, dim=0) == 80 * 8


def test_one_long_line() -> None:
    x = torch.empty(100000)
    # 0 to 99999; CUB keeps a second copy of values and indices.
    assert estimate(aten.sort.default, x) == 800000 + radix_sort_bytes(100000, 4, 8)
    assert radix_sort_bytes(100000, 4, 8) > 1200000


def test_some_long_lines_are_sorted_together() -> None:
    # By value with (index, line) pairs, then by line.
    x, count = torch.empty(10, 5000), 50000
    by_value = count * 4 + radix_sort_bytes(count, 4, 8)
    expected = 16 * count + max(by_value, radix_sort_bytes(count, 8, 0, 4))
    assert estimate(aten.sort.default, x) == expected


def test_many_long_lines() -> None:
    x, count = torch.empty(128, 5000), 640000
    # CUB aligns its parts, and asks for 255 bytes to do so: a block more, as Liger-Kernel's
    # benchmark of sparsemax measured for 2048 lines of 8192 (704.00048828125 MiB, RTX 3090).
    segmented = count * 8 + count * 12 + 255
    assert estimate(aten.sort.default, x) == segmented
    # Along the other dimension: lines made dense, with results of their own.
    assert estimate(aten.sort.default, x.t(), 0) == segmented
    y = torch.empty(5000, 128)
    assert estimate(aten.sort.default, y, 0) == count * 16 + segmented


def test_the_largest_ones() -> None:
    assert estimate(aten.topk.default, torch.empty(64, 1000), 5) == 0
    assert estimate(aten.topk.default, torch.empty(1000, 64).t(), 5) == 256000
    # 8 lines of 50257: several blocks each. 108 multiprocessors hold 6 blocks of 256 threads:
    # 402056 / 165888 = 3 items by thread, at least 4; 50 blocks by line.
    blocks = 8 * 50
    expected = 8 * (4 + 4 + 4 + 4) + blocks * (512 + 8) + scan_bytes(blocks, 4)
    assert estimate(aten.topk.default, torch.empty(8, 50257), 5) == expected


def test_running_sums() -> None:
    x = torch.empty(80, 90)
    assert estimate(aten.cumsum.default, x, 1) == 0
    assert estimate(aten.cumsum.default, x.t(), 1) == 28800
    assert estimate(aten.cumsum.default, x > 0, 1) == 57600
    assert estimate(aten.cumsum.default, x.view(-1), 0) == scan_bytes(7200, 4)


def test_drawing() -> None:
    x = torch.empty(8, 90)
    assert estimate(aten.multinomial.default, x, 1) == 2880
    assert estimate(aten.multinomial.default, x, 3) == 2880 + 24 * 4
    assert estimate(aten.multinomial.default, x, 3, True) == 2 * 2880


@pytest.mark.parametrize(
    ("count", "dtype", "key_bytes", "bits"),
    [
        # Randperm.cu: ceil(log2(n - (6 n^2 + 1) / (12 log 0.9))), where 12 log 0.9 = -1.26433.
        (1, torch.int64, 4, 3),  # 1 + 7 / 1.26433 = 6.5
        (1000, torch.int64, 4, 23),  # 1000 + 6000001 / 1.26433 = 4746602; 2^22 = 4194304
        (30000, torch.int32, 4, 32),  # 4.27e9; 2^32 = 4.29e9
        (31000, torch.int64, 8, 33),  # 4.56e9
    ],
)
def test_permutations(count: int, dtype: torch.dtype, key_bytes: int, bits: int) -> None:
    # A range of the result's type; keys, and the sorted ones.
    keys = 2 * count * key_bytes + radix_sort_bytes(count, key_bytes, dtype.itemsize, bits)
    found = estimate(aten.randperm.default, count, dtype=dtype)
    assert found == count * dtype.itemsize + keys
    assert estimate(aten.randperm.default, 0) == 0


def test_a_step_draws_a_permutation() -> None:
    x = torch.zeros(64, 4, requires_grad=True)
    graph = run_step(lambda x: x[torch.randperm(64, device=x.device)], x)
    assert ("randperm", 3 * 64 * 8 + 1) in made(graph)  # result, range and twice 64 keys of 4
    on_host = run_step(lambda x: x[torch.randperm(64).to(x.device)], x)
    assert "randperm" not in dict(made(on_host))


def test_rolling_two_dimensions_holds_what_was_rolled_first() -> None:
    x = torch.empty(2, 8, 8, 3)
    assert estimate(aten.roll.default, x, [1], [1]) == 0
    assert estimate(aten.roll.default, x, [1, 1], [1, 2]) == 384 * 4
    assert estimate(aten.roll.default, x.transpose(1, 2), [1], [1]) == 384 * 4


def test_what_values_decide_is_listed() -> None:
    assert "values" in CUDA.unmodelled[aten._unique2.default]
