from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxmem.report.cells import escape_controls, measure_width, shorten_middle
from fxmem.report.tables import Column, write_table

COLUMNS = {
    "size": Column(right=True),
    "name": Column(shorten=shorten_middle, least=10),
    "note": Column(shorten=shorten_middle, least=9, yields=True),
    "line": Column(),
}
ALL, FEW = ("size", "name", "note", "line"), ("size", "name", "line")
ROW = {"size": "12 B", "name": "n" * 20, "note": "t" * 15, "line": "net.py:7"}


def write(width: int | None) -> list[str]:
    return write_table(COLUMNS, [ALL, FEW], [ROW], width).splitlines()


def test_without_a_width_everything_is_whole() -> None:
    header, rule, row = write(None)
    assert header.split() == list(ALL)
    assert row.split() == ["12", "B", "n" * 20, "t" * 15, "net.py:7"]
    assert {len(cell) for cell in rule.split()} == {4, 20, 15, 8}


@pytest.mark.parametrize(
    ("width", "cells"),
    [
        (53, ["n" * 20, "t" * 15, "net.py:7"]),
        (52, ["n" * 20, "tttttt...ttttt", "net.py:7"]),
        (47, ["n" * 20, "ttt...ttt", "net.py:7"]),
        (46, ["nnnnnnnn...nnnnnnnn", "ttt...ttt", "net.py:7"]),
        (37, ["nnnn...nnn", "ttt...ttt", "net.py:7"]),
        (36, ["n" * 20, "net.py:7"]),
        (35, ["nnnnnnnn...nnnnnnnn", "net.py:7"]),
        (26, ["nnnn...nnn", "net.py:7"]),
        (24, ["nnn...nn", "net.py:7"]),
        (10, ["nnn...nn", "net.py:7"]),
    ],
)
def test_a_column_yields_then_names_do_then_the_column_goes(width: int, cells: list[str]) -> None:
    assert write(width)[2].split()[2:] == cells


def test_a_column_without_an_entry_is_left_out() -> None:
    rows = [{**ROW, "note": ""}, {**ROW, "note": "", "line": ""}]
    assert write_table(COLUMNS, [ALL], rows).splitlines()[0].split() == ["size", "name", "line"]


def test_a_table_without_rows_is_its_header() -> None:
    assert write_table(COLUMNS, [FEW], [], 40) == "size  name  line\n----  ----  ----"


def test_numbers_of_names_stay_as_they_are() -> None:
    assert "1e3" in write_table({"name": Column()}, [("name",)], [{"name": "1e3"}])


texts = st.text(max_size=60).map(escape_controls)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5), st.integers(18, 60))
@example([("000000\\x1f\\x1f\\x08\u1067", "")], 18)
def test_lines_fit_where_every_column_may_give(rows: list[tuple[str, str]], width: int) -> None:
    columns = {
        "a": Column(shorten=shorten_middle, least=12),
        "b": Column(shorten=shorten_middle, least=12, yields=True),
    }
    cells = [dict(zip("ab", row, strict=True)) for row in rows]
    lines = write_table(columns, [("a", "b")], cells, width).splitlines()
    assert max(map(measure_width, lines)) <= width
