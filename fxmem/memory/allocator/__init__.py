"""The CUDA caching allocator, simulated: what a step reserves, and where it runs out of memory."""

from fxmem.memory.allocator.blocks import Block
from fxmem.memory.allocator.caching import CachingAllocator, OutOfMemory, Shortage
from fxmem.memory.allocator.heap import TraceAction, TraceEvent
from fxmem.memory.allocator.memory import DeviceMemory
from fxmem.memory.allocator.parsing import parse_settings
from fxmem.memory.allocator.replay import (
    BEFORE_FIRST,
    AllocatorProfile,
    Fragmentation,
    Peak,
    replay,
)
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.memory.allocator.snapshot import BlockState, SegmentState

__all__ = [
    "BEFORE_FIRST",
    "AllocatorProfile",
    "AllocatorSettings",
    "Block",
    "BlockState",
    "CachingAllocator",
    "DeviceMemory",
    "Fragmentation",
    "OutOfMemory",
    "Peak",
    "SegmentState",
    "Shortage",
    "TraceAction",
    "TraceEvent",
    "parse_settings",
    "replay",
]
