"""Costs of recomputation: operators by a roofline of the target, and segments by their runs.

Williams, Waterman and Patterson, "Roofline" (2009): an operator takes as long as its arithmetic at
the device's rate, or as moving its operands to and from memory, whichever is longer. Normalisations
and activations are nearly free in FLOPs, and not in time.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.gpus import GpuModel, find_gpu
from fxmem.graph import MemoryGraph

_HALVES = ("float16", "bfloat16")
_ALLOCATING = ("aten.empty", "aten.new_empty")
_DEFAULT_GPU = "a100-40gb"


@dataclass(frozen=True, slots=True)
class Roofline:
    """The rates of a device."""

    flops_per_s: float  # in float32, TF32 products included where the device has them
    half_flops_per_s: float
    bandwidth_bytes_per_s: float
    launch_s: float  # the least time of an operator


SEGMENT_S = 50e-6
"""A run of a segment beside its operators, in Python and autograd: benchmarks/overhead.py."""
_HOST_S = 2e-6  # of the host for an operator, without a kernel's launch: measured there too
CPU_ROOFLINE = Roofline(500e9, 1000e9, 40e9, 2e-6)
"""A desktop processor; only ratios count."""


def find_roofline(device: str, gpu: GpuModel | None) -> Roofline:
    """Finds the roofline of a target; of ``cuda`` without a GPU, that of an A100.

    >>> find_roofline("cuda", None).bandwidth_bytes_per_s / 1e9
    1555.0
    """
    if device != "cuda":
        return CPU_ROOFLINE
    gpu = gpu or find_gpu(_DEFAULT_GPU)
    # Convolutions take TF32 by default and products do not: torch/backends/cudnn, allow_tf32.
    return Roofline(
        flops_per_s=float(gpu.fp32_flops_per_s),
        half_flops_per_s=float(gpu.half_flops_per_s or gpu.fp32_flops_per_s),
        bandwidth_bytes_per_s=float(gpu.bandwidth_bytes_per_s),
        launch_s=4e-6,
    )


def price_run(roofline: Roofline, operations: int, step_s: float) -> float:
    """Prices a run of a segment beside its operators: nothing where the host waits for a GPU."""
    host_s = operations * (_HOST_S + roofline.launch_s)
    return SEGMENT_S if roofline is CPU_ROOFLINE or host_s >= step_s else 0.0


def price_operations(graph: MemoryGraph, roofline: Roofline) -> tuple[float, ...]:
    """Prices each operation of a step in seconds, by its index.

    An operation that makes nothing and changes nothing, such as a view, takes none; nor does one
    that only allocates.
    """
    made: dict[int, list[int]] = {}
    for storage in graph.storages:
        made.setdefault(storage.born, []).append(storage.index)
    prices = []
    for operation in graph.operations:
        written = {*made.get(operation.index, ()), *operation.writes}
        storages = [graph.storages[index] for index in {*operation.reads, *written}]
        is_half = any(storage.dtype in _HALVES for storage in storages)
        flops_per_s = roofline.half_flops_per_s if is_half else roofline.flops_per_s
        moved_s = sum(storage.nbytes for storage in storages) / roofline.bandwidth_bytes_per_s
        least_s = max(operation.flops / flops_per_s, moved_s, roofline.launch_s)
        is_free = not written or operation.name.startswith(_ALLOCATING)
        prices.append(0.0 if is_free else least_s)
    return tuple(prices)
