"""Plans as plain text: one plan, and the table of all trade-offs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fxmem.graph import Phase
from fxmem.liveness import Peak
from fxmem.planning.plan import (
    GRAPH,
    DelPoint,
    InplaceChange,
    Limit,
    LimitKind,
    Plan,
    Reorder,
    Segment,
)
from fxmem.report.cells import escape_controls, measure_width, shorten_middle, shorten_name
from fxmem.report.document import Subject
from fxmem.report.tables import Column, write_table
from fxmem.report.text import write_source, write_subject
from fxmem.units import format_bytes, parse_bytes

_TO = " .. "
_NESTED = "- "
_NUMBER = Column(right=True)
_SOURCE = Column(shorten=shorten_middle, least=12, yields=True)
_NAME = Column(shorten=shorten_name, least=20)
_ALLOWED = 0.1
"""The share of time that the example below the table of trade-offs allows."""
_REASONS = 5
"""How many reasons not to compute nodes again are told; the rest are counted."""


def render_plan(
    plan: Plan, subject: Subject, *, peak: Peak | None = None, width: int | None = None
) -> str:
    """A plan, its first line the answer.

    Args:
        plan: What to tell of.
        subject: The step that it was made for.
        peak: Where the step has its peak with the plan; None where that is not known.
        width: Columns that the lines of tables and notes may take; None for no limit.

    Returns:
        Lines, each ended by a newline.
    """
    blocks = [
        f"{_write_headline(plan)}\n{write_subject(subject)}",
        _wrap(" ".join(filter(None, [_write_place(peak), _write_reserved(plan)])), width),
        _write_segments(plan, width),
        _write_inplace(plan.inplace, width),
        _write_dels(plan.dels, width),
        _write_reorders(plan.reorders, width),
        _write_limits(plan.limits, width),
        "\n".join(_wrap(note, width) for note in _write_notes(plan)),
    ]
    return _join(blocks)


def render_front(plans: Sequence[Plan], subject: Subject, *, width: int | None = None) -> str:
    """The trade-offs of a step, cheapest first, and how to take one.

    Args:
        plans: As :func:`fxmem.pareto` returns them.
        subject: The step that they were made for.
        width: Columns that the lines may take; None for no limit.

    Returns:
        Lines, each ended by a newline.
    """
    baseline_bytes = plans[0].baseline_peak_bytes
    count = f"{len(plans)} plan{'s' if len(plans) > 1 else ''}"
    least = format_bytes(min(plan.peak_bytes for plan in plans))
    blocks = [
        f"Peak {format_bytes(baseline_bytes)}; {count}, down to {least}\n{write_subject(subject)}",
        _write_rows(
            {
                "peak": _NUMBER,
                "of the step's": _NUMBER,
                "added time": _NUMBER,
                "added FLOPs": _NUMBER,
                "segments": _NUMBER,
                "in place": _NUMBER,
                "del": _NUMBER,
            },
            [_list_front_cells(plan) for plan in plans],
            width,
        ),
        _write_limits(plans[0].limits, width),
        _wrap(_write_advice(plans), width),
    ]
    return _join(blocks)


def _join(blocks: Iterable[str]) -> str:
    lines = "\n\n".join(filter(None, blocks)).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _wrap(text: str, width: int | None) -> str:
    return text if width is None else "\n".join(textwrap.wrap(text, width))


def _write_headline(plan: Plan) -> str:
    before, after = format_bytes(plan.baseline_peak_bytes), format_bytes(plan.peak_bytes)
    share = _write_share(plan.peak_bytes / (plan.baseline_peak_bytes or 1))
    text = f"Peak {before} -> {after} ({share})"
    if not plan.segments:
        return f"{text}, nothing is computed again"
    time, flops = _write_share(plan.overhead), _write_share(plan.overhead_flops)
    return f"{text} for {time} more time, {flops} more FLOPs"


def _write_place(peak: Peak | None) -> str:
    if peak is None:
        return ""
    if peak.phase is Phase.OPTIMIZER:
        return "The peak then lies in the optimizer's step."
    node = "" if peak.node is None else peak.node.name
    place = ", ".join(filter(None, [node, write_source(peak.source)]))
    return escape_controls(
        f"The peak then lies in {peak.phase.value}{f' of {place}' if place else ''}."
    )


def _write_reserved(plan: Plan) -> str:
    if plan.reserved_bytes <= plan.peak_bytes:  # as on the CPU, where nothing is reserved
        return ""
    return f"The allocator reserves {format_bytes(plan.reserved_bytes)}."


def _write_segments(plan: Plan, width: int | None) -> str:
    seconds = sum(segment.recompute_s for segment in plan.segments)
    flops = sum(segment.recompute_flops for segment in plan.segments)
    # The plan has the sums as shares of the step; each segment has its part of them.
    time_scale = plan.overhead / seconds if seconds else 0.0
    flops_scale = plan.overhead_flops / flops if flops else 0.0
    # Plans of a front do not say what each segment saves.
    is_told = any(segment.saving_bytes for segment in plan.segments)
    rows = [
        {
            "computed again": escape_controls(f"{_NESTED * depth}{_name_segment(segment)}"),
            "nodes": str(segment.nodes),
            "off the peak": _write_saving(segment.saving_bytes) if is_told and not depth else "",
            "added time": "" if depth else _write_share(segment.recompute_s * time_scale),
            "added FLOPs": "" if depth else _write_share(segment.recompute_flops * flops_scale),
            "source": escape_controls(write_source(segment.source)),
        }
        for segment, depth in _iterate_segments(plan.segments, 0)
    ]
    columns = {
        "computed again": Column(shorten=_shorten_range, least=24),
        "nodes": _NUMBER,
        "off the peak": _NUMBER,
        "added time": _NUMBER,
        "added FLOPs": _NUMBER,
        "source": _SOURCE,
    }
    without_flops = [header for header in columns if header != "added FLOPs"]
    return _write_rows(columns, rows, width, without_flops)


def _iterate_segments(segments: Iterable[Segment], depth: int) -> Iterator[tuple[Segment, int]]:
    for segment in segments:
        yield segment, depth
        yield from _iterate_segments(segment.children, depth + 1)


def _name_segment(segment: Segment) -> str:
    return segment.fqn or _name_range(segment)


def _name_range(nodes: Segment | Reorder) -> str:
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


def _write_inplace(changes: Iterable[InplaceChange], width: int | None) -> str:
    rows = [
        {
            "computed in place": escape_controls(change.node),
            "call": escape_controls(change.call),
            "off the peak": _write_saving(change.saving_bytes),
            "source": escape_controls(write_source(change.source)),
        }
        for change in changes
    ]
    columns = {
        "computed in place": _NAME,
        "call": Column(),
        "off the peak": _NUMBER,
        "source": _SOURCE,
    }
    return _write_rows(columns, rows, width)


def _write_dels(dels: Iterable[DelPoint], width: int | None) -> str:
    rows = [
        {
            "let go of": escape_controls(point.value),
            "variable": escape_controls(point.variable),
            "after": escape_controls(point.after),
            "off the peak": _write_saving(point.saving_bytes),
            "source": escape_controls(write_source(point.source)),
        }
        for point in dels
    ]
    columns = {
        "let go of": _NAME,
        "variable": Column(),
        "after": Column(shorten=shorten_name, least=12),
        "off the peak": _NUMBER,
        "source": _SOURCE,
    }
    return _write_rows(columns, rows, width)


def _write_reorders(reorders: Iterable[Reorder], width: int | None) -> str:
    rows = [
        {
            "run earlier": escape_controls(_name_range(reorder)),
            "source": escape_controls(write_source(reorder.source)),
            "before": escape_controls(reorder.before),
            "its source": escape_controls(write_source(reorder.before_source)),
            "peak then": format_bytes(reorder.peak_bytes),
        }
        for reorder in reorders
    ]
    columns = {
        "run earlier": Column(shorten=_shorten_range, least=24),
        "source": _SOURCE,
        "before": Column(shorten=shorten_name, least=12),
        "its source": _SOURCE,
        "peak then": _NUMBER,
    }
    return _write_rows(columns, rows, width)


def _write_limits(limits: Sequence[Limit], width: int | None) -> str:
    """What is never computed again, by reason, and how many nodes no segment begins with."""
    fixed = [limit for limit in limits if limit.kind is not LimitKind.BEGIN]
    lines = []
    if fixed:
        noun = "module" if fixed[0].kind is LimitKind.MODULE else "node"
        count = f"1 {noun} is" if len(fixed) == 1 else f"{len(fixed)} {noun}s are"
        lines.append(f"{count} never computed again:")
    by_reason: dict[str, list[Limit]] = {}
    for limit in fixed:
        by_reason.setdefault(limit.reason, []).append(limit)
    for reason, group in [*by_reason.items()][:_REASONS]:
        place = ", ".join(filter(None, [group[0].node, write_source(group[0].source)]))
        more = f", and {len(group) - 1} more" if len(group) > 1 else ""
        lines.append(_wrap(escape_controls(f"- {place}{more}: {reason}"), width))
    rest = sum(len(group) for group in [*by_reason.values()][_REASONS:])
    if rest:
        lines.append(f"- {rest} more for other reasons")
    starts = len(limits) - len(fixed)
    if starts:
        count = "1 node" if starts == 1 else f"{starts} nodes"
        text = f"No segment begins at {count}: what it would take is changed in place later."
        lines.append(_wrap(text, width))
    return "\n".join(lines)


def _write_notes(plan: Plan) -> Iterator[str]:
    parts: list[Segment | InplaceChange | DelPoint] = [*plan.segments, *plan.inplace, *plan.dels]
    if any(part.saving_bytes for part in parts):
        yield (
            "Off the peak is by how much the peak would rise without that row alone: rows do not "
            "add up."
        )
    if plan.inplace or plan.dels:
        # Where no graph takes the place of the user's own code, only the user can change that.
        if plan.style == GRAPH:
            yield (
                "Of what is computed in place or let go of, it is what your own code would save "
                "by that row alone."
            )
        else:
            yield (
                "What could be computed in place or let go of is for your own code, and no part of "
                "the new peak."
            )
    if plan.reorders:
        yield "What runs earlier is moved row by row; the peak then is that of the plan so far."
    if plan.lower_bound_overhead and plan.gap is not None:
        bound, gap = _write_share(plan.lower_bound_overhead), _write_share(plan.gap)
        yield f"No plan with this peak adds less than {bound} of time: this one, {gap} above that."


def _list_front_cells(plan: Plan) -> dict[str, str]:
    segments = sum(1 for _ in _iterate_segments(plan.segments, 0))
    return {
        "peak": _write_limit(plan.peak_bytes),
        "of the step's": _write_share(plan.peak_bytes / (plan.baseline_peak_bytes or 1)),
        "added time": _write_share(plan.overhead),
        "added FLOPs": _write_share(plan.overhead_flops),
        "segments": str(segments),
        "in place": str(len(plan.inplace) or ""),
        "del": str(len(plan.dels) or ""),
    }


def _write_advice(plans: Sequence[Plan]) -> str:
    if len(plans) == 1:
        return "No plan was found that takes less."
    chosen = [plan for plan in plans[1:] if plan.overhead <= _ALLOWED] or plans[1:2]
    size = _write_limit(chosen[-1].peak_bytes).replace(" ", "")
    return (
        f"Take a row by its peak, as --budget {size}, or by time, as --max-overhead {_ALLOWED}; "
        "-o plan.json writes it."
    )


def _write_limit(nbytes: int) -> str:
    """Bytes as text that is not below them: a row's peak is a budget that it keeps.

    >>> _write_limit(1024**2 + 1), _write_limit(3 * 1024**2)
    ('1.01 MiB', '3.00 MiB')
    """
    text = format_bytes(nbytes)
    value, _, unit = text.partition(" ")
    if parse_bytes(text) >= nbytes:
        return text
    return f"{float(value) + 0.01:.2f} {unit}"


def _write_saving(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _write_share(share: float) -> str:
    """A share in percent.

    >>> _write_share(0.1234), _write_share(0.0002), _write_share(0)
    ('12.3 %', '<0.1 %', '0.0 %')
    """
    text = f"{100 * share:.1f} %"
    return "<0.1 %" if share > 0 and text == "0.0 %" else text


def _write_rows(
    columns: Mapping[str, Column],
    rows: Sequence[Mapping[str, str]],
    width: int | None,
    *narrower: Sequence[str],
) -> str:
    """A table, or nothing where it has no rows."""
    return write_table(columns, [list(columns), *narrower], rows, width) if rows else ""
