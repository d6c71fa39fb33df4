"""Settings of the CUDA caching allocator, as ``PYTORCH_ALLOC_CONF`` gives them.

Sizes, their rounding and the keys are as in torch 2.13: ``c10/core/AllocatorConfig.h``,
``c10/core/AllocatorConfig.cpp``, ``c10/cuda/CUDAAllocatorConfig.cpp`` and
``c10/cuda/CUDACachingAllocator.cpp``. The syntax is taken strictly: PyTorch reads ``128M`` as 128
and ``max_split_size_mb=128`` as an internal error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fxmem.errors import UsageError

MIB = 1024**2

MIN_BLOCK_BYTES = 512
"""Every block is at least as large (``kMinBlockSize``)."""
SMALL_LIMIT_BYTES = MIB
"""The largest block of the small pool (``kSmallSize``)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""The small pool asks the device for so much at a time (``kSmallBuffer``)."""
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
        """Round a request up to the size of its block.

        Source: ``DeviceCachingAllocator::round_size`` and ``roundup_power2_next_division``.

        >>> AllocatorSettings(power2_divisions=(4,) * 16).round_size(5 * 1024**2 + 1)
        6291456
        """
        divisions = self.find_divisions(nbytes)
        if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
            power = 1 << (nbytes.bit_length() - 1)
            return _round_up(nbytes, power // divisions)
        return _round_up(nbytes, MIN_BLOCK_BYTES)

    def segment_size(self, size: int) -> int:
        """Bytes to ask the device for when no cached block serves a block of ``size`` bytes.

        Source: ``DeviceCachingAllocator::get_allocation_size``.
        """
        if size <= SMALL_LIMIT_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_OWN_SEGMENT_BYTES:
            return self.large_segment_bytes
        return _round_up(size, SEGMENT_ROUNDING_BYTES)

    def find_divisions(self, nbytes: int) -> int:
        """``AcceleratorAllocatorConfig::roundup_power2_divisions``."""
        interval = nbytes.bit_length() - _FIRST_INTERVAL_BITS
        return self.power2_divisions[min(max(interval, 0), DIVISION_INTERVALS - 1)]


def _round_up(number: int, unit: int) -> int:
    return (number + unit - 1) // unit * unit


_KEYS = {
    "max_split_size_mb": "max_split_bytes",
    "max_non_split_rounding_mb": "max_non_split_rounding_bytes",
    "large_segment_size_mb": "large_segment_bytes",
    "roundup_power2_divisions": "power2_divisions",
    "expandable_segments": "expandable_segments",
    "garbage_collection_threshold": "garbage_collection_threshold",
    "per_process_memory_fraction": "memory_fraction",
    "backend": "",
    "throw_on_cudamalloc_oom": "",
    "release_lock_on_cudamalloc": "",
    "graph_capture_record_stream_reuse": "",
}
"""By key: the field of the settings; none where nothing of the device's memory depends on it."""
_COMMA = re.compile(r",(?![^\[]*\])")


def parse_settings(text: str) -> AllocatorSettings:
    """Parses a value of ``PYTORCH_ALLOC_CONF``.

    Keys that concern pinned memory or locks are ignored.

    Args:
        text: ``key:value`` pairs, joined by commas; empty for the defaults.

    Raises:
        UsageError: An unknown key, a value that PyTorch would not take, or a key whose effect
            is not simulated.

    >>> parse_settings("max_split_size_mb:128,expandable_segments:True").max_split_bytes
    134217728
    >>> parse_settings("roundup_power2_divisions:[256:1,512:2,>:4]").power2_divisions[8:11]
    (1, 2, 4)
    """
    values: dict[str, Any] = {}
    for pair in filter(None, _COMMA.split("".join(text.split()))):
        key, colon, value = pair.partition(":")
        if not colon:
            raise UsageError(f"bad allocator setting {pair!r}", hint="write key:value,key:value")
        if key not in _KEYS and not key.startswith("pinned_"):
            raise UsageError(f"unknown allocator setting {key!r}", hint=", ".join(_KEYS))
        if pair in ("backend:cudaMallocAsync", "throw_on_cudamalloc_oom:True"):
            raise UsageError(f"{pair} is not simulated", hint="leave it out")
        if name := _KEYS.get(key):
            values[name] = _parse_value(key, value)
    large_bytes = values.get("large_segment_bytes", AllocatorSettings().large_segment_bytes)
    values.setdefault("max_non_split_rounding_bytes", large_bytes)
    # PyTorch collects garbage only where the process may not reserve all of the memory.
    if values.pop("garbage_collection_threshold", None) and values.get("memory_fraction", 1) < 1:
        raise UsageError(
            "garbage collection under per_process_memory_fraction is not simulated",
            hint="leave one of them out",
        )
    for key, least in (
        ("large_segment_size_mb", MIN_OWN_SEGMENT_BYTES + MIB),
        ("max_split_size_mb", large_bytes),
        ("max_non_split_rounding_mb", large_bytes),
    ):
        nbytes = values.get(_KEYS[key], least)
        if nbytes < least:
            raise UsageError(f"{key}:{nbytes // MIB} is too small", hint=f"{least // MIB} or more")
    return AllocatorSettings(**values)


def _parse_value(key: str, value: str) -> object:
    if key == "roundup_power2_divisions":
        return _parse_divisions(key, value)
    if key == "expandable_segments":
        if value not in ("True", "False"):
            raise UsageError(f"{key} takes True or False, not {value!r}")
        return value == "True"
    if key.endswith("_mb"):
        return min(_parse_count(key, value), UNLIMITED_BYTES // MIB) * MIB
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    is_open = key == "garbage_collection_threshold"  # of the interval from 0 to 1
    if not 0 <= share <= 1 or (is_open and share in (0, 1)):
        raise UsageError(f"{key} takes a share between 0 and 1, not {value!r}", hint=f"{key}:0.8")
    return share


def _parse_count(key: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise UsageError(f"{key} takes a whole number, not {value!r}", hint=f"e.g. {key}:128")
    return int(value)


def _parse_divisions(key: str, value: str) -> tuple[int, ...]:
    """Parses one number for all sizes, or ``[size in MiB:number,...,>:number]``.

    As in PyTorch, sizes below the first interval take its number, ``>`` stands for those behind
    the interval before it, and an interval that is not named is not rounded.
    """

    def parse_power(text: str) -> int:
        count = _parse_count(key, text)
        if count.bit_count() != 1:
            raise UsageError(f"{key} takes powers of two, not {text}")
        return count

    if not value.startswith("["):
        return (parse_power(value),) * DIVISION_INTERVALS
    if not value.endswith("]"):
        raise UsageError(f"{key} lacks the closing bracket", hint=f"{key}:[256:1,512:2,>:4]")
    divisions, last, is_first = [0] * DIVISION_INTERVALS, 0, True
    for pair in value[1:-1].split(","):
        interval, _, number = pair.partition(":")
        count = 0 if number == "0" else parse_power(number)
        if interval == ">":
            divisions[last + 1 :] = [count] * (DIVISION_INTERVALS - last - 1)
            continue
        last = min(parse_power(interval).bit_length() - 1, DIVISION_INTERVALS - 1)
        if is_first:
            divisions[:last], is_first = [count] * last, False
        divisions[last] = count
    return tuple(divisions)
