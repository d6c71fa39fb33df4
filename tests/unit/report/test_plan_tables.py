"""What the tables of a plan have in their cells."""

from __future__ import annotations

from hand_made_plans import make_plan
from hypothesis import given
from hypothesis import strategies as st

from fxmem.planning.plan import Segment
from fxmem.report.plan_tables import write_dels, write_inplace, write_limit, write_segments
from fxmem.units import parse_bytes


def list_rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("  ") if cell] for line in table.splitlines()]


def test_there_is_no_table_of_nothing() -> None:
    assert write_inplace((), None) == write_dels((), 80) == ""


def test_only_outer_segments_have_a_share_of_the_time() -> None:
    inner = Segment("b", "c", 2, recompute_s=1.0)
    segments = (
        Segment("a", "d", 4, children=(inner,), recompute_s=1.0),
        Segment("e", "e", 1, recompute_s=3.0),
    )
    plan = make_plan(segments=segments, overhead=0.2, overhead_flops=0.0)
    header, _, *rows = list_rows(write_segments(plan, None))
    at = header.index("added time")
    assert [(row[0], row[at] if len(row) > at else "") for row in rows] == [
        ("a .. d", "5.0 %"),
        ("- b .. c", ""),
        ("e", "15.0 %"),
    ]


def test_added_flops_go_first_where_there_is_no_room() -> None:
    wide, narrow = (list_rows(write_segments(make_plan(), width))[0] for width in (None, 60))
    assert [header for header in wide if header not in narrow] == ["added FLOPs"]


@given(st.integers(0, 1 << 45))
def test_a_peak_in_the_table_is_a_budget_that_its_plan_keeps(nbytes: int) -> None:
    text = write_limit(nbytes)
    assert nbytes <= parse_bytes(text) <= nbytes * 1.011 + 1
