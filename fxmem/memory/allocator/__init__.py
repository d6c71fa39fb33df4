"""The CUDA caching allocator, simulated: what a step reserves, and where it runs out of memory."""

from fxmem.memory.allocator.caching import CachingAllocator, OutOfMemory, Shortage
from fxmem.memory.allocator.heap import (
    Block,
    BlockState,
    DeviceMemory,
    SegmentState,
    TraceAction,
    TraceEvent,
)
from fxmem.memory.allocator.meter import AllocatorMeter
from fxmem.memory.allocator.settings import AllocatorSettings, parse_settings

__all__ = [
    "AllocatorMeter",
    "AllocatorSettings",
    "Block",
    "BlockState",
    "CachingAllocator",
    "DeviceMemory",
    "OutOfMemory",
    "SegmentState",
    "Shortage",
    "TraceAction",
    "TraceEvent",
    "parse_settings",
]
