"""Times by the roofline, worked out by hand from sizes and FLOPs."""

from __future__ import annotations

import pytest

from fxmem.gpus import find_gpu
from fxmem.graph import RESIDENT, Category, MemoryGraph, Operation, Phase, Storage
from fxmem.planning.model.costs import CPU_ROOFLINE, Roofline, find_roofline, price_operations

ROOFLINE = Roofline(
    flops_per_s=1e12, half_flops_per_s=4e12, bandwidth_bytes_per_s=1e9, launch_s=1e-6
)


def price(sizes: list[tuple[int, str, int]], *operations: Operation) -> tuple[float, ...]:
    """Prices operations on storages, each with its size, its dtype and when it is made."""
    storages = tuple(
        Storage(i, nbytes, Category.TEMPORARY, "", (), dtype, born, None)
        for i, (nbytes, dtype, born) in enumerate(sizes)
    )
    return price_operations(MemoryGraph((), storages, operations, ()), ROOFLINE)


def make_operation(reads: tuple[int, ...], writes: tuple[int, ...] = (), flops: int = 0):
    return Operation(0, "aten.op.default", Phase.FORWARD, reads=reads, writes=writes, flops=flops)


def test_what_moves_much_takes_the_time_to_move_it() -> None:
    """3 MB read and 2 MB written at 1 GB/s: 5 ms; their 1e9 FLOPs would take 1 ms."""
    sizes = [(3_000_000, "float32", RESIDENT), (2_000_000, "float32", 0)]
    assert price(sizes, make_operation((0,), flops=10**9)) == (pytest.approx(5e-3),)


@pytest.mark.parametrize(
    "dtype, seconds", [("float32", 0.1), ("bfloat16", 0.025), ("float16", 0.025)]
)
def test_what_computes_much_takes_the_time_to_compute_it(dtype: str, seconds: float) -> None:
    sizes = [(1000, dtype, RESIDENT), (1000, dtype, 0)]
    assert price(sizes, make_operation((0,), flops=10**11)) == (pytest.approx(seconds),)


def test_a_storage_that_is_read_twice_or_changed_moves_once() -> None:
    sizes = [(4_000_000, "float32", RESIDENT)]
    assert price(sizes, make_operation((0, 0), writes=(0,))) == (pytest.approx(4e-3),)


def test_what_is_small_takes_a_launch() -> None:
    assert price([(4, "float32", 0)], make_operation(())) == (1e-6,)


def test_views_take_nothing() -> None:
    assert price([(4_000_000, "float32", RESIDENT)], make_operation((0,))) == (0.0,)


def test_a_target_has_the_rates_of_its_gpu() -> None:
    """From NVIDIA's data sheets: an H100 SXM moves 3.35 TB/s, an A100 40 GB 1.555 TB/s."""
    h100 = find_roofline("cuda", find_gpu("h100"))
    assert h100.bandwidth_bytes_per_s == pytest.approx(3.35e12, rel=0.01)
    assert h100.half_flops_per_s == pytest.approx(989e12, rel=0.01)
    assert find_roofline("cuda", None) == find_roofline("cuda", find_gpu("a100-40gb"))
    assert find_roofline("cpu", None) is CPU_ROOFLINE
