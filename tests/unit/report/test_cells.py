from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxmem.report.cells import escape_controls, fit_columns, measure_width, shorten_middle


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


@given(st.text(), st.integers(5, 30))
def test_shortened_text_fits(text: str, width: int) -> None:
    assert measure_width(shorten_middle(escape_controls(text), width)) <= width


@given(st.lists(st.tuples(st.text(max_size=60), st.text(max_size=60)), min_size=1, max_size=5))
def test_columns_that_may_shrink_fit(rows: list[tuple[str, str]]) -> None:
    rows = [(escape_controls(a), escape_controls(b)) for a, b in rows]
    fitted = fit_columns(rows, flexible=[0, 1], width=40)
    widths = [max(measure_width(row[column]) for row in fitted) for column in (0, 1)]
    assert sum(widths) + 2 <= 40


def test_a_column_that_may_not_shrink_stays() -> None:
    rows = [["a" * 30, "b" * 30]]
    assert fit_columns(rows, flexible=[1], width=46) == [["a" * 30, "bbbbbb...bbbbb"]]
    assert fit_columns(rows, flexible=[1], width=10) == [["a" * 30, "bbbbb...bbbb"]]
