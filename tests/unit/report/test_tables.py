from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxmem.report.tables import Table, escape_controls, measure_width, shorten, write_table

HEADERS = ["size", "name", "note", "line"]
ROW = ["12 B", "n" * 30, "t" * 25, "net.py:7"]


def write(width: int | None) -> list[str]:
    form = {"right": ["size"], "names": ["name", "note"], "optional": ["note"]}
    return write_table(Table(HEADERS, [ROW], **form), width).splitlines()


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("layer1.0.relu 卷积 ñ", "layer1.0.relu 卷积 ñ"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b2J", r"\x9b2J"),  # the one-byte form of ESC [
        ("left\u202eright", r"left\u202eright"),  # would show what follows backwards
        ("\udcff", r"\udcff"),  # a byte of a file name that is no UTF-8
    ],
)
def test_control_characters_are_made_visible(text: str, escaped: str) -> None:
    assert escape_controls(text) == escaped


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [
        ("layer1", 6, "layer1"),
        ("layer1.conv", 9, "la...conv"),
        ("卷积卷积卷积", 9, "卷...卷积"),
        ("卷积", 4, "卷积"),
        ("gradient of blocks.6.layers.1.0", 20, "gradi...6.layers.1.0"),
    ],
)
def test_long_text_is_cut_after_a_third(text: str, width: int, short: str) -> None:
    assert shorten(text, width) == short


@given(text=st.text(st.sampled_from("ab. ,卷"), max_size=60) | st.text(), width=st.integers(5, 50))
@example("000000\\x1f\\x1f\\x08\u1067", 12)
def test_shortened_text_fits(text: str, width: int) -> None:
    text = escape_controls(text)
    short = shorten(text, width)
    assert measure_width(short) <= width
    assert short == text or measure_width(text) > width


@pytest.mark.parametrize(
    ("width", "cells"),
    [
        (73, ["n" * 30, "t" * 25, "net.py:7"]),
        (60, ["n" * 30, shorten("t" * 25, 12), "net.py:7"]),
        (57, ["n" * 30, "net.py:7"]),
        (35, [shorten("n" * 30, 19), "net.py:7"]),
        (10, ["n...nnnn", "net.py:7"]),
    ],
)
def test_optional_columns_go_while_names_are_not_legible(width: int, cells: list[str]) -> None:
    assert write(width)[2].split()[2:] == cells


def test_a_column_without_an_entry_is_left_out() -> None:
    table = Table(["a", "b", "c"], [["1", "", "2"], ["3", "", ""]])
    assert write_table(table).splitlines()[0].split() == ["a", "c"]


def test_names_that_are_numbers_stay_as_they_are() -> None:
    assert "1e3" in write_table(Table(["name"], [["1e3"]]))


@given(
    st.lists(st.tuples(st.text(max_size=60), st.text(max_size=60)), min_size=1, max_size=5),
    st.integers(18, 60),
)
def test_lines_fit_where_every_column_may_be_shortened(
    rows: list[tuple[str, str]], width: int
) -> None:
    lines = write_table(Table(["a", "b"], rows, names=["a", "b"]), width).splitlines()
    assert max(map(measure_width, lines), default=0) <= width
