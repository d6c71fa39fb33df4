"""The CUDA caching allocator, simulated: what a step reserves, and where it runs out of memory."""

from fxmem.allocator.blocks import Block
from fxmem.allocator.caching import CachingAllocator, OutOfMemory, Shortage
from fxmem.allocator.heap import TraceAction, TraceEvent
from fxmem.allocator.memory import DeviceMemory
from fxmem.allocator.parsing import parse_settings
from fxmem.allocator.replay import BEFORE_FIRST, AllocatorProfile, Fragmentation, Peak, replay
from fxmem.allocator.settings import AllocatorSettings
from fxmem.allocator.snapshot import BlockState, SegmentState

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
