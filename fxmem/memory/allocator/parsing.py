"""``PYTORCH_ALLOC_CONF`` to settings.

The keys and what they mean are those of torch 2.13: ``c10/core/AllocatorConfig.cpp`` and
``c10/cuda/CUDAAllocatorConfig.cpp``. Their syntax is taken strictly: PyTorch reads ``128M`` as 128
and ``max_split_size_mb=128`` as an internal error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

from fxmem.errors import UsageError
from fxmem.memory.allocator.settings import (
    DIVISION_INTERVALS,
    MIB,
    MIN_OWN_SEGMENT_BYTES,
    AllocatorSettings,
)

_COMMA = re.compile(r",(?![^\[]*\])")
_MAX_MIB = (2**64 - 1) // MIB


def parse_settings(text: str) -> AllocatorSettings:
    """The allocator settings that a value of ``PYTORCH_ALLOC_CONF`` stands for.

    Keys that concern host memory or locks are checked and otherwise ignored.

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
    pairs = [_split_pair(part) for part in _COMMA.split("".join(text.split())) if part]
    values: dict[str, Any] = {}
    for key, value in pairs:
        name, parse = _KEYS[key]
        result = parse(key, value)
        if name:
            values[name] = result
    large_bytes = values.get("large_segment_bytes", AllocatorSettings().large_segment_bytes)
    values.setdefault("max_non_split_rounding_bytes", large_bytes)
    # PyTorch collects garbage only where the process may not reserve all of the memory.
    if values.pop("garbage_collection_threshold", None) and values.get("memory_fraction", 1) < 1:
        raise UsageError(
            "garbage collection under per_process_memory_fraction is not simulated",
            hint="leave one of them out",
        )
    settings = AllocatorSettings(**values)
    for key, nbytes in (
        ("max_split_size_mb", settings.max_split_bytes),
        ("max_non_split_rounding_mb", settings.max_non_split_rounding_bytes),
    ):
        if nbytes < large_bytes:
            raise UsageError(
                f"{key}:{nbytes // MIB} is too small", hint=f"{large_bytes // MIB} or more"
            )
    return settings


def _split_pair(part: str) -> tuple[str, str]:
    key, colon, value = part.partition(":")
    if key in _KEYS and colon:
        return key, value
    name = re.split(r"[=;]", key)[0]
    if name in _KEYS or ";" in part:
        raise UsageError(f"bad allocator setting {part!r}", hint="write key:value,key:value")
    close = difflib.get_close_matches(key, _KEYS, n=1)
    hint = f"did you mean {close[0]}?" if close else "see PyTorch's notes on CUDA semantics"
    raise UsageError(f"unknown allocator setting {key!r}", hint=hint)


def _parse_count(key: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise UsageError(f"{key} takes a whole number, not {value!r}", hint=f"e.g. {key}:128")
    return int(value)


def _parse_mib(key: str, value: str) -> int:
    return min(_parse_count(key, value), _MAX_MIB) * MIB


def _parse_large_segment(key: str, value: str) -> int:
    nbytes = _parse_mib(key, value)
    if nbytes <= MIN_OWN_SEGMENT_BYTES:
        raise UsageError(f"{key}:{value} is too small", hint="more than 10")
    return nbytes


def _parse_bool(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise UsageError(f"{key} takes True or False, not {value!r}")
    return value == "True"


def _parse_share(key: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{key} takes a share from 0 to 1, not {value!r}", hint=f"{key}:0.8")
    return share


def _parse_threshold(key: str, value: str) -> float:
    share = _parse_share(key, value)
    if share in (0, 1):
        raise UsageError(f"{key}:{value} is out of range", hint="more than 0 and less than 1")
    return share


def _parse_divisions(key: str, value: str) -> tuple[int, ...]:
    """One number for all sizes, or ``[size in MiB:number,...,>:number]``.

    As in PyTorch, sizes below the first interval take its number, ``>`` stands for those behind
    the interval before it, and an interval that is not named is not rounded.
    """
    if not value.startswith("["):
        return (_parse_power(key, value),) * DIVISION_INTERVALS
    if not value.endswith("]"):
        raise UsageError(f"{key} lacks the closing bracket", hint=f"{key}:[256:1,512:2,>:4]")
    divisions, last, first = [0] * DIVISION_INTERVALS, 0, True
    for pair in value[1:-1].split(","):
        interval, _, number = pair.partition(":")
        count = 0 if number == "0" else _parse_power(key, number)
        if interval == ">":
            divisions[last + 1 :] = [count] * (DIVISION_INTERVALS - last - 1)
            continue
        last = min(_parse_power(key, interval).bit_length() - 1, DIVISION_INTERVALS - 1)
        if first:
            divisions[:last] = [count] * last
            first = False
        divisions[last] = count
    return tuple(divisions)


def _parse_power(key: str, value: str) -> int:
    count = _parse_count(key, value)
    if count.bit_count() != 1:
        raise UsageError(f"{key} takes powers of two, not {value}")
    return count


def _parse_threads(key: str, value: str) -> int:
    count = _parse_power(key, value)
    if count > 128:
        raise UsageError(f"{key}:{value} is too large", hint="128 or less")
    return count


def _parse_backend(key: str, value: str) -> None:
    if value == "cudaMallocAsync":
        raise UsageError("backend:cudaMallocAsync is not simulated", hint="only backend:native is")
    if value != "native":
        raise UsageError(f"unknown allocator backend {value!r}", hint="native")


def _parse_rejection(key: str, value: str) -> None:
    if _parse_bool(key, value):
        raise UsageError(f"{key}:True is not simulated", hint="leave it out")


_KEYS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "max_split_size_mb": ("max_split_bytes", _parse_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _parse_mib),
    "large_segment_size_mb": ("large_segment_bytes", _parse_large_segment),
    "roundup_power2_divisions": ("power2_divisions", _parse_divisions),
    "expandable_segments": ("expandable_segments", _parse_bool),
    "garbage_collection_threshold": ("garbage_collection_threshold", _parse_threshold),
    "per_process_memory_fraction": ("memory_fraction", _parse_share),
    "backend": ("", _parse_backend),
    "throw_on_cudamalloc_oom": ("", _parse_rejection),
    # Nothing of the device's memory depends on these.
    "release_lock_on_cudamalloc": ("", _parse_bool),
    "graph_capture_record_stream_reuse": ("", _parse_bool),
    "pinned_use_cuda_host_register": ("", _parse_bool),
    "pinned_use_background_threads": ("", _parse_bool),
    "pinned_free_catch_all": ("", _parse_bool),
    "pinned_num_register_threads": ("", _parse_threads),
    "pinned_reserve_segment_size_mb": ("", _parse_count),
    "pinned_max_round_threshold_mb": ("", _parse_count),
    "pinned_max_cached_size_mb": ("", _parse_count),
}
"""By key: the field of the settings, or nothing, and how its value is read."""
