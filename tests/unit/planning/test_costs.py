"""Times by the roofline, worked out by hand from sizes and FLOPs."""

from __future__ import annotations

import pytest

from fxmem.gpus import find_gpu
from fxmem.graph import RESIDENT, Category, MemoryGraph, Operation, Phase, Storage
from fxmem.planning.model.costs import (
    CPU_ROOFLINE,
    Roofline,
    find_roofline,
    price_operations,
    price_run,
)

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


MOVED = [(3_000_000, "float32", RESIDENT), (2_000_000, "float32", 0)]


def compute(dtype: str) -> list[tuple[int, str, int]]:
    return [(1000, dtype, RESIDENT), (1000, dtype, 0)]


@pytest.mark.parametrize(
    ("sizes", "operation", "seconds"),
    [
        (MOVED, make_operation((0,), flops=10**9), 5e-3),  # 5 MB at 1 GB/s; the FLOPs take 1 ms
        (compute("float32"), make_operation((0,), flops=10**11), 0.1),
        (compute("bfloat16"), make_operation((0,), flops=10**11), 0.025),
        (compute("float16"), make_operation((0,), flops=10**11), 0.025),
        ([(4_000_000, "float32", RESIDENT)], make_operation((0, 0), writes=(0,)), 4e-3),
        ([(4, "float32", 0)], make_operation(()), 1e-6),
        ([(4_000_000, "float32", RESIDENT)], make_operation((0,)), 0.0),
    ],
    ids=["moves", "computes", "bfloat16", "float16", "moves once", "launch", "view"],
)
def test_an_operation_takes_the_longest_of_its_times(
    sizes: list[tuple[int, str, int]], operation: Operation, seconds: float
) -> None:
    assert price(sizes, operation) == (pytest.approx(seconds),)


def test_a_target_has_the_rates_of_its_gpu() -> None:
    """From NVIDIA's data sheets: an H100 SXM moves 3.35 TB/s, an A100 40 GB 1.555 TB/s."""
    h100 = find_roofline("cuda", find_gpu("h100"))
    assert h100.bandwidth_bytes_per_s == pytest.approx(3.35e12, rel=0.01)
    assert h100.half_flops_per_s == pytest.approx(989e12, rel=0.01)
    assert find_roofline("cuda", None) == find_roofline("cuda", find_gpu("a100-40gb"))
    assert find_roofline("cpu", None) is CPU_ROOFLINE


def test_segments_cost_nothing_besides_where_a_gpu_has_work_to_go_on_with() -> None:
    gpu = find_roofline("cuda", None)
    assert price_run(CPU_ROOFLINE, 100, 1.0) == price_run(gpu, 100, 0.5e-3) > 0
    assert price_run(gpu, 100, 2e-3) == 0
