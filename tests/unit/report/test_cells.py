from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxmem.report.cells import escape_controls, measure_width, shorten_middle, shorten_name


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("layer1.0.relu", "layer1.0.relu"),
        ("a b", "a b"),
        ("卷积 ñ", "卷积 ñ"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b2J", r"\x9b2J"),  # the one-byte form of ESC [
        ("left\u202eright", r"left\u202eright"),  # would show what follows backwards
        ("\u2028", r"\u2028"),
        ("\udcff", r"\udcff"),  # a byte of a file name that is no UTF-8
    ],
)
def test_what_is_not_printable_is_made_visible(text: str, escaped: str) -> None:
    assert escape_controls(text) == escaped


@given(st.text())
def test_escaped_text_is_printable_and_one_line(text: str) -> None:
    escaped = escape_controls(text)
    assert escaped.isprintable()
    assert len(escaped.splitlines()) <= 1
    escaped.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [
        ("layer1", 6, "layer1"),
        ("layer1.conv", 9, "lay...onv"),
        ("卷积卷积卷积", 9, "卷...卷积"),
        ("卷积卷积卷积", 8, "卷...积"),
        ("卷积", 4, "卷积"),
    ],
)
def test_long_text_is_cut_in_the_middle(text: str, width: int, short: str) -> None:
    assert shorten_middle(text, width) == short


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [
        ("blocks.6.layers.1.0.weight.exp_avg", 34, "blocks.6.layers.1.0.weight.exp_avg"),
        ("blocks.6.layers.1.0.weight.exp_avg", 33, "...6.layers.1.0.weight.exp_avg"),
        ("blocks.6.layers.1.0.weight.exp_avg", 28, "...layers.1.0.weight.exp_avg"),
        ("blocks.6.layers.1.0.weight.exp_avg", 27, "...1.0.weight.exp_avg"),
        ("blocks.6.layers.1.0.weight.exp_avg", 12, "...exp_avg"),
        ("blocks.6.layers.1.0.weight.exp_avg", 11, "bloc..._avg"),
        ("gradient of blocks.6.layers.1.0", 30, "gradient of ...6.layers.1.0"),
        ("gradient of blocks.6.layers.1.0", 20, "gradient ...yers.1.0"),
        ("h.0.attn.scaled_dot_product_attention", 36, "...attn.scaled_dot_product_attention"),
        ("h.0.attn.scaled_dot_product_attention", 28, "h.0.attn.scaled_...ention"),
        ("h.0.attn.scaled_dot_product_attention", 20, "h.0.attn....ttention"),
        ("block.norm1, block.norm2", 23, "block.norm1, ..."),
        ("block.norm1, 3 more", 18, "block.norm1, ..."),
        ("body.block.norm1, 3 more", 18, "...norm1, ..."),
        ("scaled_dot_product_attention", 26, "scaled_dot_p...t_attention"),
    ],
)
def test_a_qualified_name_keeps_its_last_parts(text: str, width: int, short: str) -> None:
    assert shorten_name(text, width) == short


@pytest.mark.parametrize("shorten", [shorten_middle, shorten_name])
@given(text=st.text(st.sampled_from("ab. ,卷"), max_size=60) | st.text(), width=st.integers(5, 50))
def test_shortened_text_fits(shorten: Callable[[str, int], str], text: str, width: int) -> None:
    text = escape_controls(text)
    short = shorten(text, width)
    assert measure_width(short) <= width
    assert short == text or measure_width(text) > width
