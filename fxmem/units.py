"""Bytes to text and back, in binary units."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from numbers import Real

from fxmem.errors import UsageError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_HINT = "write it as 8GiB, 512MiB or 80GB"
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")


def format_bytes(nbytes: int) -> str:
    """Writes a number of bytes in the largest binary unit that leaves at least 1.

    >>> format_bytes(0), format_bytes(1536), format_bytes(851_863_142)
    ('0 B', '1.50 KiB', '812.40 MiB')
    """
    value, unit = float(abs(nbytes)), 0
    # 1023.995 would print as "1024.00": the next unit reads better.
    while value >= 1023.995 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    text = f"{value:.0f}" if unit == 0 else f"{value:.2f}"
    return f"{'-' if nbytes < 0 else ''}{text} {_UNITS[unit]}"


def parse_bytes(text: str) -> int:
    """Reads a number of bytes with a unit, in upper or lower case.

    KiB, MiB, GiB, TiB and the short forms K, M, G, T are binary; KB, MB, GB, TB are decimal.

    Raises:
        UsageError: The text is no size.

    >>> parse_bytes("8GiB"), parse_bytes("1.5 k"), parse_bytes("80GB")
    (8589934592, 1536, 80000000000)
    """
    match = _QUANTITY.fullmatch(text)
    if match:
        # A float has 53 bits: it would lose bytes of a large exact number.
        number, unit = Fraction(match[1]), match[2].upper() or "B"
        if unit in _DECIMAL:
            return int(number * _DECIMAL[unit])
        for power, name in enumerate(_UNITS):
            if unit in (name.upper(), name[0].upper()):
                return int(number * 1024**power)
    raise UsageError(f"{text!r} is not a size in bytes", hint=_HINT)


def resolve_bytes(size: str | float) -> int:
    """Resolves a number of bytes, or text that :func:`parse_bytes` reads.

    Raises:
        UsageError: The argument is no size.

    >>> resolve_bytes("8GiB"), resolve_bytes(0.5 * 2**30)
    (8589934592, 536870912)
    """
    if isinstance(size, str):
        return parse_bytes(size)
    if isinstance(size, bool) or not (isinstance(size, Real) and 0 <= size < math.inf):
        raise UsageError(f"{size!r} is not a size in bytes", hint=_HINT)
    return int(size)


def format_flops(flops: int) -> str:
    """Writes a number of floating-point operations in decimal units.

    >>> format_flops(8_178_000_000)
    '8.18 GFLOP'
    """
    value = float(flops)
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if value < 999.995:
            return f"{value:.0f} {unit}" if unit == "FLOP" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} PFLOP"
