from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxmem.errors import UsageError
from fxmem.units import format_bytes, format_flops, parse_bytes, resolve_bytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024**2 - 1, "1.00 MiB"),
        (851_863_142, "812.40 MiB"),
        (1024**6, "1024.00 PiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_bytes_are_written_in_the_largest_unit_that_fits(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512B", 512),
        (512.9, 512),
        ("8GiB", 8 * 1024**3),
        ("8G", 8 * 1024**3),
        (" 1.5 mib ", 3 * 1024**2 // 2),
        (".5k", 512),
        ("80GB", 80 * 10**9),
        ("9007199254740993", 9007199254740993),
        ("1PiB", 1024**5),
    ],
)
def test_a_size_is_a_number_or_text_in_binary_or_decimal_units(
    text: str | float, nbytes: int
) -> None:
    assert resolve_bytes(text) == nbytes


@pytest.mark.parametrize("size", ["", "GiB", "-1GiB", "1 XiB", "1e3", -1, True, math.nan, [8]])
def test_what_is_no_size_is_an_error_that_says_how_to_write_one(size: Any) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_bytes(size)
    message = f"{size!r} is not a size in bytes (write it as 8GiB, 512MiB or 80GB)"
    assert str(caught.value) == message


@given(st.integers(0, 10**18))
def test_a_size_survives_text_up_to_its_rounding(nbytes: int) -> None:
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= max(nbytes * 0.005, 0)


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (999, "999 FLOP"),
        (1000, "1.00 kFLOP"),
        (999_999_999, "1.00 GFLOP"),
        (3 * 10**18, "3000.00 PFLOP"),
    ],
)
def test_flops_are_written_in_decimal_units(flops: int, text: str) -> None:
    assert format_flops(flops) == text
