"""The tables of a plan: segments, changes in place, deletions; and of a front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from fxmem.planning.plan import DelPoint, InplaceChange, Plan, Segment
from fxmem.report.cells import escape_controls, measure_width, shorten_middle, shorten_name
from fxmem.report.tables import Column, write_table
from fxmem.report.text import write_source
from fxmem.units import format_bytes, parse_bytes

_TO = " .. "
_NESTED = "- "
_NUMBER = Column(right=True)
_SOURCE = Column(shorten=shorten_middle, least=12, yields=True)
_NAME = Column(shorten=shorten_name, least=20)
_NEIGHBOUR = Column(shorten=shorten_name, least=12)

_Row = TypeVar("_Row")


def write_segments(plan: Plan, width: int | None) -> str:
    """What is computed again, what lies in another under it."""
    seconds = sum(segment.recompute_s for segment in plan.segments)
    flops = sum(segment.recompute_flops for segment in plan.segments)
    # The plan has the sums as shares of the step; each segment has its part of them.
    time_scale = plan.overhead / seconds if seconds else 0.0
    flops_scale = plan.overhead_flops / flops if flops else 0.0
    # Plans of a front do not say what each segment saves.
    is_told = any(segment.saving_bytes for segment in plan.segments)

    def write_own_saving(row: tuple[Segment, int]) -> str:
        segment, depth = row
        return _write_saving(segment.saving_bytes) if is_told and not depth else ""

    return _write_rows(
        {
            "computed again": (_RANGE, lambda row: _NESTED * row[1] + _name_segment(row[0])),
            "nodes": (_NUMBER, lambda row: str(row[0].nodes)),
            "off the peak": (_NUMBER, write_own_saving),
            "added time": (
                _NUMBER,
                lambda row: "" if row[1] else write_share(row[0].recompute_s * time_scale),
            ),
            "added FLOPs": (
                _NUMBER,
                lambda row: "" if row[1] else write_share(row[0].recompute_flops * flops_scale),
            ),
            "source": (_SOURCE, lambda row: write_source(row[0].source)),
        },
        [*_iterate_segments(plan.segments, 0)],
        width,
        left_out="added FLOPs",
    )


def write_inplace(changes: Sequence[InplaceChange], width: int | None) -> str:
    """What is computed in place."""
    return _write_rows(
        {
            "computed in place": (_NAME, lambda change: change.node),
            "call": (Column(), lambda change: change.call),
            "off the peak": (_NUMBER, lambda change: _write_saving(change.saving_bytes)),
            "source": (_SOURCE, lambda change: write_source(change.source)),
        },
        changes,
        width,
    )


def write_dels(dels: Sequence[DelPoint], width: int | None) -> str:
    """What is let go of, and where."""
    return _write_rows(
        {
            "let go of": (_NAME, lambda point: point.value),
            "variable": (Column(), lambda point: point.variable),
            "after": (_NEIGHBOUR, lambda point: point.after),
            "off the peak": (_NUMBER, lambda point: _write_saving(point.saving_bytes)),
            "source": (_SOURCE, lambda point: write_source(point.source)),
        },
        dels,
        width,
    )


def write_front(plans: Sequence[Plan], width: int | None) -> str:
    """The trade-offs of a step."""

    def count_segments(plan: Plan) -> str:
        return str(sum(1 for _ in _iterate_segments(plan.segments, 0)))

    def write_left(plan: Plan) -> str:
        return write_share(plan.peak_bytes / (plan.baseline_peak_bytes or 1))

    return _write_rows(
        {
            "peak": (_NUMBER, lambda plan: write_limit(plan.peak_bytes)),
            "of the step's": (_NUMBER, write_left),
            "added time": (_NUMBER, lambda plan: write_share(plan.overhead)),
            "added FLOPs": (_NUMBER, lambda plan: write_share(plan.overhead_flops)),
            "segments": (_NUMBER, count_segments),
            "in place": (_NUMBER, lambda plan: str(len(plan.inplace) or "")),
            "del": (_NUMBER, lambda plan: str(len(plan.dels) or "")),
        },
        plans,
        width,
    )


def write_limit(nbytes: int) -> str:
    """Bytes as text that is not below them: a row's peak is a budget that it keeps.

    >>> write_limit(1024**2 + 1), write_limit(3 * 1024**2)
    ('1.01 MiB', '3.00 MiB')
    """
    text = format_bytes(nbytes)
    value, _, unit = text.partition(" ")
    if parse_bytes(text) >= nbytes:
        return text
    return f"{float(value) + 0.01:.2f} {unit}"


def write_share(share: float) -> str:
    """A share in percent.

    >>> write_share(0.1234), write_share(0.0002), write_share(0)
    ('12.3 %', '<0.1 %', '0.0 %')
    """
    text = f"{100 * share:.1f} %"
    return "<0.1 %" if share > 0 and text == "0.0 %" else text


def _write_rows(
    fields: Mapping[str, tuple[Column, Callable[[_Row], str]]],
    items: Sequence[_Row],
    width: int | None,
    left_out: str = "",
) -> str:
    """A table, or nothing where it has no rows.

    Args:
        fields: By header, how its cells are shown, and what an item has there.
        items: One for each row.
        width: Columns that the lines may take; None for no limit.
        left_out: The header that goes first where the lines are too long.
    """
    if not items:
        return ""
    columns = {header: column for header, (column, _) in fields.items()}
    rows = [
        {header: escape_controls(write(item)) for header, (_, write) in fields.items()}
        for item in items
    ]
    layouts = [list(columns)]
    if left_out:
        layouts.append([header for header in columns if header != left_out])
    return write_table(columns, layouts, rows, width)


def _write_saving(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _iterate_segments(segments: Iterable[Segment], depth: int) -> Iterator[tuple[Segment, int]]:
    for segment in segments:
        yield segment, depth
        yield from _iterate_segments(segment.children, depth + 1)


def _name_segment(segment: Segment) -> str:
    return segment.fqn or _name_range(segment)


def _name_range(nodes: Segment) -> str:
    return nodes.first if nodes.first == nodes.last else f"{nodes.first}{_TO}{nodes.last}"


def _shorten_range(text: str, width: int) -> str:
    """Both ends of a range, each shortened like a name.

    >>> _shorten_range("- blocks.10.norm2 .. blocks.10.contract", 31)
    '- ...10.norm2 .. ...contract'
    """
    name = text.lstrip(_NESTED)
    nested = text[: len(text) - len(name)]
    first, to, last = name.partition(_TO)
    room = width - measure_width(nested + to)
    if not to:
        return nested + shorten_name(name, room)
    last = shorten_name(last, max(room - measure_width(first), room // 2))
    return nested + shorten_name(first, room - measure_width(last)) + to + last


_RANGE = Column(shorten=_shorten_range, least=24)
