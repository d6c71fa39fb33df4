"""The temporary storage that CUB asks for, as PyTorch's sorts and scans allocate it.

Source: CUB 2 and 3, ``device/dispatch/dispatch_radix_sort.cuh`` (``InvokeOnesweep``,
``DispatchSegmentedRadixSort``) and ``dispatch_scan.cuh``. Sizes of tiles are those of its policies
for compute capability 8.0; on later ones they differ, and with them the small terms: a sort's share
is that of its second copy of keys and values.
"""

from __future__ import annotations

_ALIGNMENT = 256
_DIGITS = 256
_DIGIT_BITS = 8
_OFFSET_BYTES = 8
_COUNTER_BYTES = 4
_PADDING_TILES = 32


def radix_sort_bytes(count: int, key_bytes: int, value_bytes: int, bits: int | None = None) -> int:
    """Temporary storage of ``DeviceRadixSort::SortPairs`` and ``SortKeys``.

    Args:
        count: Pairs.
        key_bytes: Size of a key.
        value_bytes: Size of a value; 0 for keys alone.
        bits: That are sorted by; all of the key's if None.

    >>> radix_sort_bytes(1000, 8, 8)  # one tile: nothing but the kernel's own memory
    1
    """
    widest = max(key_bytes, value_bytes, 4)
    if count <= 256 * max(1, 19 * 4 // widest):
        return 1
    passes = -(-(8 * key_bytes if bits is None else bits) // _DIGIT_BITS)
    tiles = -(-count // (384 * max(1, 21 * 4 // widest)))
    copies = count if passes > 1 else 0
    return _alias(
        passes * _DIGITS * _OFFSET_BYTES,
        tiles * _DIGITS * _COUNTER_BYTES,
        copies * key_bytes,
        copies * value_bytes,
        passes * _COUNTER_BYTES,
    )


def segmented_radix_sort_bytes(count: int, key_bytes: int, value_bytes: int) -> int:
    """Temporary storage of ``DeviceSegmentedRadixSort::SortPairs``: a third copy of all pairs."""
    return _alias(count * key_bytes, count * value_bytes)


def scan_bytes(count: int, itemsize: int) -> int:
    """Temporary storage of ``DeviceScan`` and of what scans inside: a state for each tile."""
    tiles = -(-count // (128 * max(1, 15 * 4 // max(itemsize, 4))))
    return _alias((tiles + _PADDING_TILES) * 2 * max(itemsize, 4))


def _alias(*sizes: int) -> int:
    """``alias_temporaries``: parts of one allocation, each aligned."""
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes) + _ALIGNMENT - 1
