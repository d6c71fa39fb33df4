"""What ``PYTORCH_ALLOC_CONF`` decides of the CUDA caching allocator.

Sizes and their rounding as in PyTorch's ``c10/core/AllocatorConfig.h`` and
``c10/cuda/CUDACachingAllocator.cpp``; checked against torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024**2

MIN_BLOCK_BYTES = 512
"""Every block is at least as large (``kMinBlockSize``)."""
SMALL_LIMIT_BYTES = MIB
"""The largest block of the small pool (``kSmallSize``)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""What the small pool asks the device for (``kSmallBuffer``)."""
MIN_OWN_SEGMENT_BYTES = 10 * MIB
"""From this size on a block gets a segment of its own (``kMinLargeAlloc``)."""
SEGMENT_ROUNDING_BYTES = 2 * MIB
"""To which such a segment is rounded up (``kRoundLarge``)."""
UNLIMITED_BYTES = 2**64 - 1
"""``max_split_size`` where it was not set: every block may be split."""

DIVISION_INTERVALS = 16
_FIRST_INTERVAL_BITS = MIB.bit_length()


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The settings of the native allocator that decide how much memory it takes.

    Attributes:
        max_split_bytes: Blocks at least as large are never split for a smaller request.
        max_non_split_rounding_bytes: How much larger than a request such a block may be.
        large_segment_bytes: The segment from which blocks of 1 to 10 MiB are cut.
        power2_divisions: Divisions between two powers of two to which sizes are rounded, for
            sizes up to 2 MiB, 4 MiB and so on, the last for 32 GiB and more; 0 and 1 are off.
        expandable_segments: Whether segments grow by pages.
        memory_fraction: Share of the device's memory that the process may reserve.

    >>> AllocatorSettings().round_size(1_000), AllocatorSettings().segment_size(3 * 1024**2)
    (1024, 20971520)
    """

    max_split_bytes: int = UNLIMITED_BYTES
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    power2_divisions: tuple[int, ...] = (0,) * DIVISION_INTERVALS
    expandable_segments: bool = False
    memory_fraction: float = 1.0

    def round_size(self, nbytes: int) -> int:
        """The size of the block that a request needs.

        Source: ``DeviceCachingAllocator::round_size`` and ``roundup_power2_next_division``.

        >>> AllocatorSettings(power2_divisions=(4,) * 16).round_size(5 * 1024**2 + 1)
        6291456
        """
        divisions = self._find_divisions(nbytes)
        if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
            power = 1 << (nbytes.bit_length() - 1)
            return _round_up(nbytes, power // divisions)
        return _round_up(nbytes, MIN_BLOCK_BYTES)

    def segment_size(self, size: int) -> int:
        """What the device is asked for when no cached block serves a block of ``size`` bytes.

        Source: ``DeviceCachingAllocator::get_allocation_size``.
        """
        if size <= SMALL_LIMIT_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_OWN_SEGMENT_BYTES:
            return self.large_segment_bytes
        return _round_up(size, SEGMENT_ROUNDING_BYTES)

    def _find_divisions(self, nbytes: int) -> int:
        """``AcceleratorAllocatorConfig::roundup_power2_divisions``."""
        interval = nbytes.bit_length() - _FIRST_INTERVAL_BITS
        return self.power2_divisions[min(max(interval, 0), DIVISION_INTERVALS - 1)]


def _round_up(number: int, unit: int) -> int:
    return (number + unit - 1) // unit * unit
