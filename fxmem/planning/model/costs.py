"""What it costs to run an operator again: time by a roofline of the target, and FLOPs.

Williams, Waterman and Patterson, "Roofline" (2009): an operator takes as long as its arithmetic at
the device's rate, or as moving its operands to and from memory, whichever is longer. Normalisations
and activations are nearly free in FLOPs, and not in time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fxmem.gpus import GpuModel, find_gpu
from fxmem.graph import MemoryGraph, Operation

_HALVES = ("float16", "bfloat16")
_DEFAULT_GPU = "a100-40gb"


@dataclass(frozen=True, slots=True)
class Roofline:
    """How fast a device is.

    Attributes:
        flops_per_s: In float32, TF32 products included where the device has them.
        half_flops_per_s: In float16 and bfloat16.
        bandwidth_bytes_per_s: Of its memory.
        launch_s: What an operator takes at least.
    """

    flops_per_s: float
    half_flops_per_s: float
    bandwidth_bytes_per_s: float
    launch_s: float


CPU_ROOFLINE = Roofline(500e9, 1000e9, 40e9, 2e-6)
"""A desktop processor; only ratios count."""


def find_roofline(device: str, gpu: GpuModel | None) -> Roofline:
    """The roofline of a target.

    Args:
        device: ``cuda`` or ``cpu``.
        gpu: The GPU that is meant; None for an A100.

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


def price_operations(graph: MemoryGraph, roofline: Roofline) -> tuple[float, ...]:
    """The seconds that each operation takes at least, by its index.

    What makes nothing and changes nothing, such as a view, takes none.

    Args:
        graph: The memory graph of a step.
        roofline: Of the target.
    """
    made: dict[int, list[int]] = {}
    for storage in graph.storages:
        made.setdefault(storage.born, []).append(storage.index)
    return tuple(
        _price(graph, operation, made.get(operation.index, ()), roofline)
        for operation in graph.operations
    )


def _price(
    graph: MemoryGraph, operation: Operation, made: Iterable[int], roofline: Roofline
) -> float:
    written = {*made, *operation.writes}
    if not written:
        return 0.0
    storages = [graph.storages[index] for index in {*operation.reads, *written}]
    is_half = any(storage.dtype in _HALVES for storage in storages)
    rate = roofline.half_flops_per_s if is_half else roofline.flops_per_s
    moved_bytes = sum(storage.nbytes for storage in storages)
    return max(
        operation.flops / rate, moved_bytes / roofline.bandwidth_bytes_per_s, roofline.launch_s
    )
