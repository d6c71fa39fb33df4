"""Plans and advice as plain text: one plan, the table of trade-offs, and other savings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from fxmem.graph import Phase
from fxmem.memory.liveness import Peak
from fxmem.planning.plan import (
    GRAPH,
    DelPoint,
    InplaceChange,
    Limit,
    LimitKind,
    Plan,
    Segment,
)
from fxmem.report.document import Subject
from fxmem.report.tables import join_blocks, wrap, write_table
from fxmem.report.text import write_place, write_source, write_subject
from fxmem.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from fxmem.advice.record import Advice

_ALLOWED = 0.1
"""The share of time that the example below the table of trade-offs allows."""
_REASONS = 5
"""The reasons not to recompute nodes that are listed; nodes with others are counted."""
_NUMBERS = (
    *("nodes", "off the peak", "added time", "added FLOPs"),
    *("peak", "of the step's", "segments", "in place", "del"),
)
_NAMES = (*("recomputed", "computed in place", "freed early", "after", "source"),)

_Row = TypeVar("_Row")


def render_plan(
    plan: Plan, subject: Subject, *, peak: Peak | None = None, width: int | None = None
) -> str:
    """Writes a plan; its first line has the new peak and its cost.

    Args:
        plan: The plan.
        subject: The step that it was made for.
        peak: The peak of the step with the plan; None where that is not known.
        width: Columns that the lines of tables and notes may take; None for no limit.

    Returns:
        Lines, each ended by a newline.
    """
    place = [] if peak is None else [f"The new peak is in {_write_new_place(peak)}."]
    if plan.reserved_bytes > plan.peak_bytes:  # not on the CPU, where nothing is reserved
        place.append(f"The allocator reserves {format_bytes(plan.reserved_bytes)}.")
    return join_blocks(
        [
            f"{_write_headline(plan)}\n{write_subject(subject)}",
            wrap(" ".join(place), width),
            write_segments(plan, width),
            *_write_changes(plan, width),
            _write_limits(plan.limits, width),
            "\n".join(wrap(note, width) for note in _write_notes(plan)),
        ]
    )


def render_front(plans: Sequence[Plan], subject: Subject, *, width: int | None = None) -> str:
    """Writes the trade-offs of a step, cheapest first, and how to choose one.

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
    fields: dict[str, Callable[[Plan], str]] = {
        "peak": lambda plan: write_limit(plan.peak_bytes),
        "of the step's": lambda plan: write_share(plan.peak_bytes / (baseline_bytes or 1)),
        "added time": lambda plan: write_share(plan.overhead),
        "added FLOPs": lambda plan: write_share(plan.overhead_flops),
        "segments": lambda plan: str(sum(1 for _ in _iterate_segments(plan.segments))),
        "in place": lambda plan: str(len(plan.inplace) or ""),
        "del": lambda plan: str(len(plan.dels) or ""),
    }
    advice = "No plan with a lower peak was found."
    if len(plans) > 1:
        chosen = [plan for plan in plans[1:] if plan.overhead <= _ALLOWED] or plans[1:2]
        size = write_limit(chosen[-1].peak_bytes).replace(" ", "")
        advice = (
            f"Choose a row by its peak, as --budget {size}, or by its time, as "
            f"--max-overhead {_ALLOWED}; -o plan.json saves the plan."
        )
    return join_blocks(
        [
            f"Peak {format_bytes(baseline_bytes)}; {count}, down to {least}\n"
            f"{write_subject(subject)}",
            _write_rows(fields, plans, width),
            _write_limits(plans[0].limits, width),
            wrap(advice, width),
        ]
    )


def render_advice(
    advice: Sequence[Advice],
    baseline_bytes: int,
    subject: Subject | None = None,
    *,
    width: int | None = None,
) -> str:
    """Writes what else lowers a peak, most first.

    Args:
        advice: As :func:`fxmem.advise` returns it.
        baseline_bytes: The peak without any of it.
        subject: The step, where the text stands alone; None where it follows a plan's.
        width: Columns that the lines may take; None for no limit.

    Returns:
        Lines, each ended by a newline.
    """
    peak = format_bytes(baseline_bytes)
    title = "Nothing else that was tried lowers the peak by 0.5 % or 1 MiB."
    if advice:
        title = f"Other ways to lower the peak of {peak}, each by itself and without a plan:"
    blocks = [] if subject is None else [f"Peak {peak}\n{write_subject(subject)}"]
    blocks.append(wrap(title, width))
    for each in advice:
        saving, left = format_bytes(each.saving_bytes), format_bytes(each.peak_bytes)
        lines = (
            f"- {saving} off the peak, {left} left: {each.change}.",
            f"  Write: {each.option}",
            f"  Cost: {each.cost}",
        )
        blocks.append("\n".join(wrap(line, width, indent="  ") for line in lines))
    return join_blocks(blocks)


def write_segments(plan: Plan, width: int | None) -> str:
    """Writes a table of what is recomputed; a segment within another is below that."""
    seconds = sum(segment.recompute_s for segment in plan.segments)
    flops = sum(segment.recompute_flops for segment in plan.segments)
    # The plan has the sums as shares of the step; each segment has its part of them.
    time_scale = plan.overhead / seconds if seconds else 0.0
    flops_scale = plan.overhead_flops / flops if flops else 0.0
    # Plans of a front do not have the saving of each segment.
    has_savings = any(segment.saving_bytes for segment in plan.segments)

    def outer(write: Callable[[Segment], str]) -> Callable[[tuple[Segment, int]], str]:
        return lambda row: "" if row[1] else write(row[0])

    fields: dict[str, Callable[[tuple[Segment, int]], str]] = {
        "recomputed": lambda row: "- " * row[1] + (row[0].fqn or _name_range(row[0])),
        "nodes": lambda row: str(row[0].nodes),
        "off the peak": outer(lambda s: _write_saving(s.saving_bytes) if has_savings else ""),
        "added time": outer(lambda s: write_share(s.recompute_s * time_scale)),
        "added FLOPs": outer(lambda s: write_share(s.recompute_flops * flops_scale)),
        "source": lambda row: write_source(row[0].source),
    }
    return _write_rows(fields, [*_iterate_segments(plan.segments)], width, ["added FLOPs"])


def write_limit(nbytes: int) -> str:
    """Writes bytes as text that is not below them: a row's peak is a budget that it keeps.

    >>> write_limit(1024**2 + 1), write_limit(3 * 1024**2)
    ('1.01 MiB', '3.00 MiB')
    """
    text = format_bytes(nbytes)
    value, _, unit = text.partition(" ")
    return text if parse_bytes(text) >= nbytes else f"{float(value) + 0.01:.2f} {unit}"


def write_share(share: float) -> str:
    """Writes a share in percent.

    >>> write_share(0.1234), write_share(0.0002), write_share(0)
    ('12.3 %', '<0.1 %', '0.0 %')
    """
    text = f"{100 * share:.1f} %"
    return "<0.1 %" if share > 0 and text == "0.0 %" else text


def _write_headline(plan: Plan) -> str:
    before, after = format_bytes(plan.baseline_peak_bytes), format_bytes(plan.peak_bytes)
    share = write_share(plan.peak_bytes / (plan.baseline_peak_bytes or 1))
    text = f"Peak {before} -> {after} ({share})"
    if not plan.segments:
        return f"{text}, nothing is recomputed"
    time, flops = write_share(plan.overhead), write_share(plan.overhead_flops)
    return f"{text} for {time} more time, {flops} more FLOPs"


def _write_new_place(peak: Peak) -> str:
    if peak.phase is Phase.OPTIMIZER:
        return "the optimizer step"
    return write_place(peak.phase, peak.node.name if peak.node else None, peak.source)


def _write_changes(plan: Plan, width: int | None) -> Iterator[str]:
    """Writes tables of what is computed in place and freed early."""
    yield _write_rows(
        {
            "computed in place": lambda change: change.node,
            "call": lambda change: change.call,
            "off the peak": lambda change: _write_saving(change.saving_bytes),
            "source": lambda change: write_source(change.source),
        },
        plan.inplace,
        width,
    )
    yield _write_rows(
        {
            "freed early": lambda point: point.value,
            "variable": lambda point: point.variable,
            "after": lambda point: point.after,
            "off the peak": lambda point: _write_saving(point.saving_bytes),
            "source": lambda point: write_source(point.source),
        },
        plan.dels,
        width,
    )


def _write_limits(limits: Sequence[Limit], width: int | None) -> str:
    """Writes what is never recomputed, by reason, and how many nodes no segment begins with."""
    fixed = [limit for limit in limits if limit.kind is not LimitKind.BEGIN]
    lines = []
    if fixed:
        noun = "module" if fixed[0].kind is LimitKind.MODULE else "node"
        lines.append(
            f"{_count(fixed, noun)} {'is' if len(fixed) == 1 else 'are'} never recomputed:"
        )
    by_reason: dict[str, list[Limit]] = {}
    for limit in fixed:
        by_reason.setdefault(limit.reason, []).append(limit)
    for reason, group in [*by_reason.items()][:_REASONS]:
        place = ", ".join(filter(None, [group[0].node, write_source(group[0].source)]))
        more = f", and {len(group) - 1} more" if len(group) > 1 else ""
        lines.append(f"- {place}{more}: {reason}")
    rest = sum(len(group) for group in [*by_reason.values()][_REASONS:])
    if rest:
        lines.append(f"- {rest} more for other reasons")
    starts = [limit for limit in limits if limit.kind is LimitKind.BEGIN]
    if starts:
        what = "its input is" if len(starts) == 1 else "their inputs are"
        lines.append(
            f"No segment begins at {_count(starts, 'node')}: {what} modified in place later."
        )
    return "\n".join(wrap(line, width) for line in lines)


def _count(items: Collection[object], noun: str) -> str:
    return f"1 {noun}" if len(items) == 1 else f"{len(items)} {noun}s"


def _write_notes(plan: Plan) -> Iterator[str]:
    rows: list[Segment | InplaceChange | DelPoint] = [*plan.segments, *plan.inplace, *plan.dels]
    if any(row.saving_bytes for row in rows):
        yield (
            '"Off the peak" is how much the peak would rise without that row alone; rows do not '
            "add up."
        )
    if plan.inplace or plan.dels:
        # Where no graph takes the place of the user's own code, only the user can change that.
        if plan.style == GRAPH:
            yield (
                "For rows in place and freed early, it is what that change saves in your own code."
            )
        else:
            yield (
                "Rows in place and freed early are changes to make in your own code; the new peak "
                "does not count them."
            )
    if plan.lower_bound_overhead and plan.gap is not None:
        bound, gap = write_share(plan.lower_bound_overhead), write_share(plan.gap)
        yield f"Any plan with this peak adds at least {bound} time; this one adds {gap} more."


def _write_rows(
    fields: Mapping[str, Callable[[_Row], str]],
    items: Iterable[_Row],
    width: int | None,
    optional: Sequence[str] = (),
) -> str:
    """Writes a table of items by the cells of each header; nothing where there are no items."""
    rows = [[write(item) for write in fields.values()] for item in items]
    if not rows:
        return ""
    return write_table(
        [*fields], rows, right=_NUMBERS, names=_NAMES, optional=optional, width=width
    )


def _write_saving(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _iterate_segments(segments: Iterable[Segment], depth: int = 0) -> Iterator[tuple[Segment, int]]:
    for segment in segments:
        yield segment, depth
        yield from _iterate_segments(segment.children, depth + 1)


def _name_range(nodes: Segment) -> str:
    return nodes.first if nodes.first == nodes.last else f"{nodes.first} .. {nodes.last}"
